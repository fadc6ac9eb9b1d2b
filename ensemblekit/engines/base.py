"""What an engine is: it computes the members' outputs and takes the objective's gradient back into each member.

The objective is computed on a detached leaf (M, B, C); no method knows which engine runs, and no engine knows a method.
An engine works on a fixed list of slots. When members are added or frozen, the trainer makes a new one from the same
slots, which hold everything that training changes; so a run can also go on with another engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Model
from ensemblekit.data.loading import Batch

COUNTERS = {"step", "mu_product", "eta", "mu"}
"""What torch's optimizers keep once for a parameter and not for each of its elements."""
BuildOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OptimizerState = dict[str, dict[str, Any]]
"""For each parameter by name, what the optimizer keeps of it."""


@dataclass
class Slot:
    """One member in training: its network, whether it still learns, and its optimizer's state between engines."""

    network: nn.Module
    model: Model
    member: int
    """The index that its seed was derived from."""
    frozen: bool = False
    steps: int = 0
    """Steps it has been trained for."""
    draws_globally: bool = False
    """Whether its network draws from torch's global generator in training, whose order threads would mix up."""
    optimizer_state: OptimizerState = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """What all engines can be told."""

    device: torch.device
    build_optimizer: BuildOptimizer
    bf16: bool = False
    compile: bool = False
    recompute: bool = False
    elementwise: bool = True
    """Whether the optimizer treats every element of a parameter alike, so that parameters can be joined."""
    clip_norm: float | None = None
    passes: int | None = None
    """Noisy passes of each network in predictions; None: one, without noise."""


class Engine(ABC):
    """Trains the members of some slots, step by step."""

    name: ClassVar[str]

    def __init__(self, slots: Sequence[Slot], objective: Objective, settings: Settings) -> None:
        keep_freed_memory()
        self.slots = list(slots)
        self.objective = objective
        self.settings = settings
        self.running = [slot for slot in slots if objective.needs_frozen_members or not slot.frozen]
        """The slots whose outputs the objective sees."""
        self.has_second_pass = objective.has_second_pass

    @abstractmethod
    def forward(self, inputs: Tensor, step: int) -> Tensor:
        """The outputs (M, B, C) of the running slots, detached; what `backward` needs is kept."""

    @abstractmethod
    def backward(self, gradient: Tensor) -> None:
        """Send d objective / d outputs (M, B, C) into the members that learn; gradients of two passes add up."""

    @abstractmethod
    def forward_again(self) -> Tensor:
        """As `forward`, for the second inputs of each slot, which `backward` has made from the first."""

    @abstractmethod
    def update(self, learning_rate: float) -> None:
        """One step of the optimizer for every member that learns."""

    @abstractmethod
    def predict(self, inputs: Tensor) -> Tensor:
        """The outputs (M, B, C) of all slots for evaluation, or those of all passes in turn; nothing changes."""

    @abstractmethod
    def store_optimizer_state(self) -> None:
        """Bring the slots' `optimizer_state` up to date."""

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release what the engine holds besides its slots."""

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        """One step; returns the objective (a scalar) and the running slots' outputs (M, B, C), both on the device."""
        value, outputs = self._learn(self.forward(batch.inputs, step), batch, weights)
        if self.has_second_pass:
            value = value + self._learn(self.forward_again(), batch, weights)[0]
        self.update(learning_rate)
        return value, outputs

    def _learn(self, outputs: Tensor, batch: Batch, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the members learn from their outputs; returns the objective and the outputs."""
        leaf = outputs.requires_grad_()
        value = self.objective(leaf, batch.targets, weights)
        (gradient,) = torch.autograd.grad(value, leaf)
        self.backward(gradient)
        return value.detach(), leaf.detach()

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that networks compute in; the objective is always computed in float32."""
        if not self.settings.bf16:
            return nullcontext()
        return torch.autocast(self.settings.device.type, torch.bfloat16)


def sent_back(
    gradient: Tensor, outputs: Tensor, parameters: Sequence[Tensor], inputs: Tensor | None
) -> tuple[Sequence[Tensor], Tensor | None]:
    """The gradients of the parameters, and of the inputs if those require one, from that of the outputs."""
    gradient = gradient.to(outputs.dtype)
    if inputs is None or not inputs.requires_grad:
        return torch.autograd.grad(outputs, parameters, gradient, materialize_grads=True), None
    *found, of_inputs = torch.autograd.grad(outputs, [*parameters, inputs], gradient, materialize_grads=True)
    return found, of_inputs


def added(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sums of two passes' gradients; there are none yet after the first."""
    return [first + second for first, second in zip(gradients, more, strict=True)] if gradients else more


def at_least_float32(outputs: Tensor) -> Tensor:
    """What the objective works on: outputs of reduced precision are brought back."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
