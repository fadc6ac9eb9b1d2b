"""A part of an engine: one or several networks that are computed as one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.core.objective import Moment, Objective
from ensemblekit.core.outputs import pad
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.step import Backend
from ensemblekit.members.flat_parameters import clip_per_member, flat_weights, split_weights
from ensemblekit.members.state import MemberState
from ensemblekit.members.stochastic import MemberUniform


class Part(Backend):
    """One or several networks that are computed as one."""

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        self.members = list(members)
        self.objective, self.settings = objective, settings
        self.frozen = members[0].frozen
        numbers = [index for member in members for index in member.indices]
        self.indices = torch.tensor(numbers, dtype=torch.int64, device=settings.device)
        self.optimizer = members[0].optimizer or settings.optimizer
        self.rate_factor = self.optimizer.learning_rate / settings.optimizer.learning_rate
        """How its learning rate differs from that of the spec."""
        self.gradients: Sequence[Tensor] = ()
        self.first_weights: Tensor | None = None
        """The weights (K, P) that are updated, while others are in their place."""
        self.first_buffers: list[Tensor] = []
        self.keys: Tensor | None = None
        """Keys of the random numbers for each member's view of the batch."""
        if objective.members.have_views:
            self.keys = MemberUniform.keys_of(settings.seed, numbers, settings.device)

    @property
    @abstractmethod
    def learned_rows(self) -> list[Tensor]:
        """The learned parameters of the K networks, each (K, …)."""

    @property
    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The buffers of the networks."""

    @abstractmethod
    def gradient_rows(self) -> Sequence[Tensor]:
        """Return the gradients of the learned parameters, each (K, …)."""

    @abstractmethod
    def take_step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """Take one step of the optimizer with gradients (K, …)."""

    @abstractmethod
    def compute(self, inputs: Tensor, passes: int | None) -> Tensor:
        """Compute outputs (S, K, B, C) of S stochastic passes in evaluation mode; (1, K, B, C) if `passes` is None.

        Inputs are (B, …), or (K, B, …) where each member has its own view.
        """

    @abstractmethod
    def store_optimizer_state(self) -> None:
        """Bring the members' `optimizer_state` up to date."""

    def views(self, inputs: Tensor, step: int | None) -> Tensor:
        """Return what the members see of a batch: (K, B, …) if a method says so, else the inputs as they are.

        Args:
            inputs: (B, …).
            step: of training; None in a prediction.
        """
        if self.keys is None:
            return inputs
        uniform = MemberUniform(self.keys, 0 if step is None else step)
        return self.objective.members.views(inputs, self.indices, uniform, training=step is not None)

    def predict(self, inputs: Tensor, passes: int | None = None, samples: Samples | None = None) -> Tensor:
        """Compute outputs (S, K, B, W) of S stochastic passes in evaluation mode; (1, K, B, W) if `passes` is None.

        Args:
            inputs: (B, …).
            passes: S.
            samples: which samples these are, if they are samples of a split.
        """
        if samples is not None and all(samples.split in member.known for member in self.members):
            known = torch.cat([member.known[samples.split] for member in self.members])
            return known[:, samples.index].unsqueeze(0)
        return pad(at_least_float32(self.compute(self.views(inputs, None), passes)), self.settings.width)

    def update(self, learning_rate: float, moment: Moment) -> None:
        """Take one step of the optimizer, with the gradients that were computed."""
        if self.frozen:
            return
        if self.first_weights is not None:
            self._replace_weights(self.first_weights)
            for buffer, value in zip(self.buffers, self.first_buffers, strict=True):
                buffer.copy_(value)  # batch-norm statistics count a batch once
            self.first_weights = None
        gradients = clip_per_member(self.gradient_rows(), self.settings.clip_norm)
        if self.objective.members.have_penalty:
            gradients = sum_gradients(gradients, self._penalty_gradients(moment))
        self.take_step(gradients, learning_rate * self.rate_factor)
        self.gradients = ()
        for member in self.members:
            member.steps += 1

    def _penalty_gradients(self, moment: Moment) -> list[Tensor]:
        rows = self.learned_rows
        weights = flat_weights(rows).requires_grad_()
        starts = [member.start for member in self.members if member.start is not None]
        arguments = {
            "start": torch.stack(starts) if starts else weights.detach(),
            "members": self.indices[: len(weights)],
            "num_members": self.settings.num_members or len(self.members),
            "num_samples": self.settings.num_samples,
            "epoch": moment.epoch,
            "num_epochs": moment.num_epochs,
            "progress": moment.progress,
        }
        value = self.objective.members.penalty(weights, **arguments)
        (gradient,) = torch.autograd.grad(value, weights, materialize_grads=True)
        return split_weights(gradient, rows)

    def move_to_second_weights(self) -> None:
        if self.frozen:
            return
        self.first_weights = flat_weights(self.learned_rows)
        self.first_buffers = [buffer.clone() for buffer in self.buffers]
        gradient = flat_weights(self.gradient_rows())
        self._replace_weights(self.objective.members.second_weights(self.first_weights, gradient))
        self.gradients = ()

    def _replace_weights(self, weights: Tensor) -> None:
        rows = self.learned_rows
        with torch.no_grad():
            for tensor, value in zip(rows, split_weights(weights, rows), strict=True):
                tensor.copy_(value)

    def backward_and_update(self, gradient: Tensor, learning_rate: float, moment: Moment) -> None:
        self.backward(gradient)
        self.update(learning_rate, moment)


@dataclass(frozen=True)
class Samples:
    """Some samples of a split."""

    split: str
    index: Tensor
    """Their indices in the split (B,)."""


def backpropagate(
    gradient: Tensor, outputs: Tensor, parameters: Sequence[Tensor], inputs: Tensor | None
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the gradients of the parameters, and of the inputs if those require one, from that of the outputs."""
    # grad_outputs of torch.autograd.grad would give the same bits, but its first use imports sympy, for 0.2 s
    product = (outputs * gradient.to(outputs.dtype)).sum()
    if inputs is None or not inputs.requires_grad:
        return torch.autograd.grad(product, parameters, materialize_grads=True), None
    *gradients, input_gradient = torch.autograd.grad(product, [*parameters, inputs], materialize_grads=True)
    return gradients, input_gradient


def sum_gradients(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add the gradients of a second pass to those of the first, if there are any."""
    return [first + second for first, second in zip(gradients, more, strict=True)] if gradients else more


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert outputs of reduced precision to float32, in which the objective is computed."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
