"""What an engine is: it computes the members' outputs and backpropagates the objective's gradient into each member.

The objective is computed on a detached leaf (M, B, C); no method knows which engine runs, and no engine knows a method.
An engine works on a fixed list of members, divided into parts that are computed as one. When members are added or
frozen, the trainer makes a new engine from the same member states, which hold everything that training changes; so a
run can also be continued with another engine. Where several processes train the members together, an engine computes
those of its process, and the objective sees the gathered outputs of all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ensemblekit.core.objective import START, Moment, Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.part import Part, Samples
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.step import Backend, training_step
from ensemblekit.members.state import MemberState
from ensemblekit.ranks.group import Group

Result = TypeVar("Result")


class Engine(Backend):
    """Trains some members, step by step."""

    name: ClassVar[str]
    separates: ClassVar[bool] = True
    """Whether the parts of a separable objective are trained one by one: the memory of one part is then enough."""

    limits_threads: bool = False
    """Whether it lets a single thread compute each operation on a CPU, always or where that is faster."""

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        self.members = list(members)
        self.objective = objective
        self.settings = settings
        all_groups = self._groups_by_rank()
        groups = all_groups[settings.group.rank]
        self.parts = [self.make_part([self.members[index] for index in group]) for group in groups]
        self.learning_elsewhere = [member for member in self.members if not member.is_here and not member.frozen]
        active = [objective.needs_frozen_members or not member.frozen for member in self.members]
        self.active_members = [member for member, flag in zip(self.members, active, strict=True) if flag]
        self.columns = [index for member in self.active_members if not member.auxiliary for index in member.indices]
        """The indices in the spec of the members whose outputs the objective sees, as numbers."""
        self.indices = torch.tensor(self.columns, dtype=torch.int64, device=settings.device)
        active_rows = self._rows(groups, active)
        self.active = [self.parts[number] for number in active_rows]
        """The parts whose outputs the objective sees."""
        self.rows = [_as_slice(rows) for rows in active_rows.values()]
        """For each active part, the rows of its members in the objective's outputs."""
        self.active_rows = Rows([self._rows(groups, active) for groups in all_groups])
        flags = [predicts(member, objective) for member in self.members]
        self.predicting = [self.parts[number] for number in self._rows(groups, flags)]
        """The parts that predictions need."""
        self.predicted_rows = Rows([self._rows(groups, flags) for groups in all_groups])
        numbers = [index for member in self.members if not member.auxiliary for index in member.indices]
        self.predicted = torch.tensor(numbers, dtype=torch.int64, device=settings.device)
        """The indices in the spec of all members (M,), on the device."""
        self.num_samples = 0
        """Samples of the batch that was computed last."""

    def _groups_by_rank(self) -> list[list[list[int]]]:
        """Divide the members of each process, by index, into those that are computed as one."""
        size = self.settings.group.size
        own = [[i for i, member in enumerate(self.members) if size == 1 or member.rank == rank] for rank in range(size)]
        return [
            [[indices[number] for number in group] for group in self.groups([self.members[index] for index in indices])]
            for indices in own
        ]

    def _rows(self, groups: Sequence[Sequence[int]], flags: Sequence[bool]) -> dict[int, list[int]]:
        """Return the rows that each part has in the outputs of the networks that are flagged, by the part's number."""
        ends = list(accumulate(member.size if flag else 0 for member, flag in zip(self.members, flags, strict=True)))
        rows = [list(range(end - member.size, end)) for member, end in zip(self.members, ends, strict=True)]
        return {
            number: [row for index in group for row in rows[index]]
            for number, group in enumerate(groups)
            if flags[group[0]]
        }

    @classmethod
    @abstractmethod
    def unsupported(cls, members: Sequence[MemberState], settings: EngineSettings) -> str | None:
        """Return why this engine cannot train these members; None if it can."""

    @abstractmethod
    def groups(self, members: Sequence[MemberState]) -> list[list[int]]:
        """Divide the members, by index, into those that are computed as one."""

    @abstractmethod
    def make_part(self, members: Sequence[MemberState]) -> Part:
        """Return what computes a group of members."""

    def map(self, work: Callable[[Any], Result], items: Sequence[Any]) -> list[Result]:
        """Do the work for every item; here one after the other."""
        return [work(item) for item in items]

    def arrange(self, inputs: Tensor) -> Tensor:
        """Return the inputs in the memory format that suits the engine."""
        return inputs

    def close(self) -> None:
        """Release threads and the like."""

    def prepare_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment = START
    ) -> None:
        """Announce the next step; see `train_step`. An engine that several runs share trains their steps at once."""

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment = START
    ) -> tuple[Tensor, Tensor]:
        """Train on one batch; see `training_step`. The outputs are those of the active members.

        If `is_apart`, members of other processes are not waited for: the objective is then that of each part here (P,),
        and the outputs are those of the members here; `collect` completes both.
        """
        if (arranged := self.arrange(batch.inputs)) is not batch.inputs:
            batch = replace(batch, inputs=arranged)
        for member in self.learning_elsewhere:
            member.steps += 1
        if not (self.is_apart or (self.objective.separable and self.separates)):
            return training_step(self, self.objective, batch, weights, learning_rate, step, moment)

        def train(index: int) -> tuple[Tensor, Tensor]:
            part_weights = None if weights is None else weights[:, self.rows[index]]
            part, size = self.active[index], len(self.indices)
            return training_step(part, self.objective, batch, part_weights, learning_rate, step, moment, size)

        results = self.map(train, range(len(self.active)))
        values, outputs = [value for value, _ in results], [outputs for _, outputs in results]
        if self.is_apart:
            none = batch.targets.new_zeros(0, dtype=torch.float32)
            return torch.stack(values) if values else none, self._joined(outputs, len(batch.index))
        return torch.stack(values).sum(), self.active_rows.ordered(self._joined(outputs, len(batch.index)))

    @property
    def is_apart(self) -> bool:
        """Whether a step needs nothing of the members of other processes."""
        return self.objective.separable and not self.settings.group.is_alone

    def collect(self, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Complete the results of steps that were trained apart, in one exchange.

        Args:
            values: for each step, the objectives of the parts here (P,).
            outputs: for each step, the outputs (K, B, C) of the members here.

        Returns:
            For each step, the objective and the outputs (M, B, C) of all members.
        """
        group, sizes = self.settings.group, [output.shape[1] for output in outputs]
        joined = self.active_rows.gathered(group, torch.cat(list(outputs), dim=1))
        objectives = self.active_rows.gathered_parts(group, torch.stack(list(values), dim=1))
        return [value.contiguous().sum() for value in objectives.unbind(1)], list(joined.split(sizes, dim=1))

    def gather(self, outputs: Tensor) -> Tensor:
        return self.active_rows.gathered(self.settings.group, outputs)

    def forward(self, batch: Batch, step: int) -> Tensor:
        self.num_samples = len(batch.index)
        return self._joined(self.map(lambda part: part.forward(batch, step), self.active), self.num_samples)

    def forward_second(self) -> Tensor:
        return self._joined(self.map(lambda part: part.forward_second(), self.active), self.num_samples)

    def _joined(self, outputs: Sequence[Tensor], num_samples: int) -> Tensor:
        """Concatenate the outputs of the parts here; a process may have no part."""
        if not outputs:
            return torch.zeros(0, num_samples, self.settings.width or 0, device=self.settings.device)
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))

    def move_to_second_weights(self) -> None:
        self.map(lambda part: part.move_to_second_weights(), self.active)

    def backward(self, gradient: Tensor) -> None:
        self.map(lambda pair: pair[0].backward(gradient[pair[1]]), list(zip(self.active, self.rows, strict=True)))

    def backward_and_update(self, gradient: Tensor, learning_rate: float, moment: Moment) -> None:
        def work(pair: tuple[Part, slice | list[int]]) -> None:
            part, rows = pair
            part.backward_and_update(gradient[rows], learning_rate, moment)

        # one piece of work per part, so that parts wait for each other only at the objective; the part that was
        # computed last comes first, because its activations may still be in the cache
        self.map(work, list(zip(self.active, self.rows, strict=True))[::-1])

    def remember(self, split: str, batches: Callable[[], Iterator[Batch]], max_bytes: int) -> None:
        """Compute the outputs of frozen members for all samples of a split once, if the objective needs them.

        Args:
            split: the name of the split.
            batches: iterates over its samples in their order.
            max_bytes: members with larger outputs are computed in every step.
        """
        for part in self.active:
            size = sum(member.size for member in part.members)
            num_bytes = 4 * size * self.settings.num_samples * (self.settings.width or 1)
            if part.frozen and num_bytes <= max_bytes and not any(split in member.known for member in part.members):
                outputs = torch.cat([part.predict(self.arrange(batch.inputs))[0] for batch in batches()], dim=1)
                for member, rows in zip(part.members, outputs.split([m.size for m in part.members]), strict=True):
                    member.known[split] = rows.clone()

    def predict(self, inputs: Tensor, samples: Samples | None = None) -> Tensor:
        """Compute the outputs (R, B, W) of the networks that predict, in evaluation mode.

        Args:
            inputs: (B, …).
            samples: which samples these are, if they are samples of a split.

        Returns:
            Those of the members, or (S · R, B, W) of S stochastic passes, the first pass first.
        """
        return self._by_pass(self._predict_here(inputs, samples))

    def predict_split(
        self, split: str, batches: Iterable[Batch], before_batch: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Compute the outputs of the networks that predict for all samples of a split, as `predict` does.

        Args:
            split: the name of the split.
            batches: its samples in their order.
            before_batch: called before each batch; it may raise to stop.
        """
        parts = []
        for batch in batches:
            before_batch()
            parts.append(self._predict_here(batch.inputs, Samples(split, batch.index)))
        return self._by_pass(torch.cat(parts, dim=2))

    def _predict_here(self, inputs: Tensor, samples: Samples | None) -> Tensor:
        """Compute the outputs (K, S, B, W) of the networks here that predict."""
        arranged, passes = self.arrange(inputs), self.settings.passes
        outputs = self.map(lambda part: part.predict(arranged, passes, samples).transpose(0, 1), self.predicting)
        if not outputs:
            return torch.zeros(0, passes or 1, len(inputs), self.settings.width or 0, device=self.settings.device)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _by_pass(self, outputs: Tensor) -> Tensor:
        """Gather the outputs of all processes, pass by pass: (S · R, B, W)."""
        return self.predicted_rows.gathered(self.settings.group, outputs).transpose(0, 1).flatten(0, 1)

    def store_optimizer_state(self) -> None:
        """Bring the members' `optimizer_state` up to date."""
        for part in self.parts:
            part.store_optimizer_state()


def predicts(member: MemberState, objective: Objective) -> bool:
    """Return whether predictions need the outputs of a network."""
    if objective.predictor is not None:
        return member.auxiliary == objective.predictor
    return not member.auxiliary or objective.predicts_with_auxiliary


class Rows:
    """Where the rows of each part are in the outputs of all members.

    Args:
        by_rank: for each process, the rows of its parts, by the part's number.
    """

    def __init__(self, by_rank: Sequence[Mapping[int, Sequence[int]]]) -> None:
        parts = [list(rows) for parts in by_rank for rows in parts.values()]
        self.counts = [sum(len(rows) for rows in parts.values()) for parts in by_rank]
        """The number of rows of each process."""
        self.part_counts = [len(parts) for parts in by_rank]
        self.order = _order([row for rows in parts for row in rows])
        """Position in the concatenated outputs of each row; None if they are in order."""
        self.part_order = _order([rows[0] for rows in parts])

    def ordered(self, outputs: Tensor) -> Tensor:
        """Put the concatenated outputs of all parts in order."""
        return outputs if self.order is None else outputs[self.order]

    def gathered(self, group: Group, outputs: Tensor) -> Tensor:
        """Gather the concatenated outputs of the parts of each process, in order."""
        return self.ordered(group.gather_rows(outputs, self.counts))

    def gathered_parts(self, group: Group, values: Tensor) -> Tensor:
        """Gather a row of values for each part of each process, in order."""
        rows = group.gather_rows(values, self.part_counts)
        return rows if self.part_order is None else rows[self.part_order]


def _order(positions: Sequence[int]) -> list[int] | None:
    """Return the inverse of a permutation; None if it is the identity."""
    if list(positions) == sorted(positions):
        return None
    return sorted(range(len(positions)), key=positions.__getitem__)


def _as_slice(rows: list[int]) -> slice | list[int]:
    """Return consecutive rows as a slice, which indexes without a copy."""
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[0] + len(rows)) if consecutive else rows
