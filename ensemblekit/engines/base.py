"""What an engine is: it computes the members' outputs and backpropagates the objective's gradient into each member.

The objective is computed on a detached leaf (M, B, C); no method knows which engine runs, and no engine knows a method.
An engine works on a fixed list of members, divided into parts that are computed as one. When members are added or
frozen, the trainer makes a new engine from the same member states, which hold everything that training changes; so a
run can also be continued with another engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
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

Result = TypeVar("Result")


class Engine(Backend):
    """Trains some members, step by step."""

    name: ClassVar[str]
    separates: ClassVar[bool] = True
    """Whether the parts of a separable objective are trained one by one: the memory of one part is then enough."""

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        self.members = list(members)
        self.objective = objective
        self.settings = settings
        groups = self.groups(self.members)
        self.parts = [self.make_part([self.members[index] for index in group]) for group in groups]
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
        self.active_order = _order([row for rows in active_rows.values() for row in rows])
        """Position in the concatenated outputs of the active parts of each row; None if they are in order."""
        predicting = self._rows(groups, [predicts(member, objective) for member in self.members])
        self.predicting = [self.parts[number] for number in predicting]
        """The parts that predictions need."""
        self.order = _order([row for rows in predicting.values() for row in rows])
        numbers = [index for member in self.members if not member.auxiliary for index in member.indices]
        self.predicted = torch.tensor(numbers, dtype=torch.int64, device=settings.device)
        """The indices in the spec of all members (M,), on the device."""

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

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment = START
    ) -> tuple[Tensor, Tensor]:
        """Train on one batch; see `training_step`. The outputs are those of the active members."""
        batch = replace(batch, inputs=self.arrange(batch.inputs))
        if not (self.objective.separable and self.separates):
            return training_step(self, self.objective, batch, weights, learning_rate, step, moment)

        def train(index: int) -> tuple[Tensor, Tensor]:
            part_weights = None if weights is None else weights[:, self.rows[index]]
            part, size = self.active[index], len(self.indices)
            return training_step(part, self.objective, batch, part_weights, learning_rate, step, moment, size)

        values, outputs = zip(*self.map(train, range(len(self.active))), strict=True)
        return torch.stack(values).sum(), _join(outputs, self.active_order)

    def forward(self, batch: Batch, step: int) -> Tensor:
        return _join(self.map(lambda part: part.forward(batch, step), self.active), self.active_order)

    def forward_second(self) -> Tensor:
        return _join(self.map(lambda part: part.forward_second(), self.active), self.active_order)

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
        inputs, passes = self.arrange(inputs), self.settings.passes
        outputs = self.map(lambda part: part.predict(inputs, passes, samples).transpose(0, 1), self.predicting)
        return _join(outputs, self.order).transpose(0, 1).flatten(0, 1)

    def store_optimizer_state(self) -> None:
        """Bring the members' `optimizer_state` up to date."""
        for part in self.parts:
            part.store_optimizer_state()


def predicts(member: MemberState, objective: Objective) -> bool:
    """Return whether predictions need the outputs of a network."""
    if objective.predictor is not None:
        return member.auxiliary == objective.predictor
    return not member.auxiliary or objective.predicts_with_auxiliary


def _order(positions: Sequence[int]) -> list[int] | None:
    """Return the inverse of a permutation; None if it is the identity."""
    if list(positions) == sorted(positions):
        return None
    return sorted(range(len(positions)), key=positions.__getitem__)


def _as_slice(rows: list[int]) -> slice | list[int]:
    """Return consecutive rows as a slice, which indexes without a copy."""
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[0] + len(rows)) if consecutive else rows


def _join(outputs: Sequence[Tensor], order: list[int] | None) -> Tensor:
    """Concatenate the outputs of several parts and put their rows in order."""
    joined = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
    return joined if order is None else joined[order]
