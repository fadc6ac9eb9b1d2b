"""What an engine is: it computes the members' outputs and backpropagates the objective's gradient into each member.

The objective is computed on a detached leaf (M, B, C); no method knows which engine runs, and no engine knows a method.
An engine works on a fixed list of members, divided into parts that are computed as one. When members are added or
frozen, the trainer makes a new engine from the same member states, which hold everything that training changes; so a
run can also be continued with another engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ensemblekit.core.objective import START, Moment, Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.step import Backend, training_step
from ensemblekit.members.state import MemberState
from ensemblekit.spec.optimizers import AnyOptimizer
from ensemblekit.spec.sections import Spec

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineSettings:
    """Settings that all engines share."""

    device: torch.device
    optimizer: AnyOptimizer
    bf16: bool = False
    compile: bool = False
    recompute: bool = False
    clip_norm: float | None = None
    passes: int | None = None
    """Stochastic passes per network in predictions; None: one deterministic pass."""

    @classmethod
    def of(cls, spec: Spec, device: torch.device, passes: int | None) -> EngineSettings:
        """Return the settings of a spec."""
        return cls(
            device,
            spec.optimizer,
            bf16=spec.engine.precision == "bf16",
            compile=spec.engine.compile,
            recompute=spec.engine.recompute,
            clip_norm=spec.training.clip_norm,
            passes=passes,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that sets the networks' precision; the objective is always computed in float32."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()


class Part(Backend):
    """One or several members that are computed as one."""

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        self.members = list(members)
        self.objective, self.settings = objective, settings
        self.frozen = members[0].frozen
        self.indices = member_indices(members, settings.device)

    @abstractmethod
    def update(self, learning_rate: float) -> None:
        """Take one step of the optimizer."""

    @abstractmethod
    def predict(self, inputs: Tensor, passes: int | None = None) -> Tensor:
        """Compute outputs (S, K, B, C) of S stochastic passes in evaluation mode; (1, K, B, C) if `passes` is None."""

    @abstractmethod
    def store_optimizer_state(self) -> None:
        """Bring the members' `optimizer_state` up to date."""

    def backward_and_update(self, gradient: Tensor, learning_rate: float) -> None:
        self.backward(gradient)
        self.update(learning_rate)


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
        self.order = _order([index for group in groups for index in group])
        """Position in the concatenated outputs of all parts of each member's outputs; None if they are in order."""
        self.active = [part for part in self.parts if objective.needs_frozen_members or not part.frozen]
        """The parts whose outputs the objective sees."""
        flags = [objective.needs_frozen_members or not member.frozen for member in self.members]
        self.active_members = [member for member, flag in zip(self.members, flags, strict=True) if flag]
        self.indices = member_indices(self.active_members, settings.device)
        rows = {index: sum(flags[:index]) for index in range(len(flags))}
        active_rows = [[rows[index] for index in group] for group in groups if flags[group[0]]]
        self.rows = [_as_slice(part_rows) for part_rows in active_rows]
        """For each active part, the rows of its members in the objective's outputs."""
        self.active_order = _order([row for part_rows in active_rows for row in part_rows])

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
            part, size = self.active[index], len(self.active_members)
            return training_step(part, self.objective, batch, part_weights, learning_rate, step, moment, size)

        values, outputs = zip(*self.map(train, range(len(self.active))), strict=True)
        return torch.stack(values).sum(), _join(outputs, self.active_order)

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return _join(self.map(lambda part: part.forward(inputs, step), self.active), self.active_order)

    def forward_second(self) -> Tensor:
        return _join(self.map(lambda part: part.forward_second(), self.active), self.active_order)

    def backward(self, gradient: Tensor) -> None:
        self.map(lambda pair: pair[0].backward(gradient[pair[1]]), list(zip(self.active, self.rows, strict=True)))

    def backward_and_update(self, gradient: Tensor, learning_rate: float) -> None:
        def work(pair: tuple[Part, slice | list[int]]) -> None:
            part, rows = pair
            part.backward_and_update(gradient[rows], learning_rate)

        # one piece of work per part, so that parts wait for each other only at the objective; the part that was
        # computed last comes first, because its activations may still be in the cache
        self.map(work, list(zip(self.active, self.rows, strict=True))[::-1])

    def predict(self, inputs: Tensor) -> Tensor:
        """Compute the outputs (M, B, C) of all members in evaluation mode; (S · M, B, C) of S stochastic passes."""
        inputs = self.arrange(inputs)
        outputs = self.map(lambda part: part.predict(inputs, self.settings.passes).transpose(0, 1), self.parts)
        return _join(outputs, self.order).transpose(0, 1).flatten(0, 1)

    def store_optimizer_state(self) -> None:
        """Bring the members' `optimizer_state` up to date."""
        for part in self.parts:
            part.store_optimizer_state()


def member_indices(members: Sequence[MemberState], device: torch.device) -> Tensor:
    """Return the indices of members in the spec, int64 (K,), on a device."""
    return torch.tensor([member.seed_index for member in members], device=device)


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


def backpropagate(
    gradient: Tensor, outputs: Tensor, parameters: Sequence[Tensor], inputs: Tensor | None
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the gradients of the parameters, and of the inputs if those require one, from that of the outputs."""
    gradient = gradient.to(outputs.dtype)
    if inputs is None or not inputs.requires_grad:
        return torch.autograd.grad(outputs, parameters, gradient, materialize_grads=True), None
    *gradients, input_gradient = torch.autograd.grad(outputs, [*parameters, inputs], gradient, materialize_grads=True)
    return gradients, input_gradient


def sum_gradients(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add the gradients of a second pass to those of the first, if there are any."""
    return [first + second for first, second in zip(gradients, more, strict=True)] if gradients else more


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert outputs of reduced precision to float32, in which the objective is computed."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
