"""The step algorithm, written once.

Members meet only at their outputs: a step needs the outputs of the members that run here, the outputs of all members,
and the gradient of the outputs of the members that run here. Where the first and the second differ, as for members on
several processes, `gather` and `scatter` exchange them; nothing else of a step knows about it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ensemblekit.core.objective import START, Moment, Objective
from ensemblekit.data.loading import Batch


class Backend(ABC):
    """The members that a step trains: all of an engine's, or one part of them."""

    indices: Tensor
    """The indices in the spec of the members whose outputs `forward` returns, int64 (K,), on the device."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> Tensor:
        """Compute the outputs (K, B, C) in training mode, detached; keeps what `backward` needs."""

    @abstractmethod
    def forward_second(self) -> Tensor:
        """Compute the outputs for the second inputs of each member, which `backward` derived from the first."""

    @abstractmethod
    def move_to_second_weights(self) -> None:
        """Replace the weights by those that a method derives from the gradients, until the next update."""

    @abstractmethod
    def backward(self, gradient: Tensor) -> None:
        """Backpropagate d objective / d outputs (K, B, C); gradients of two passes add up."""

    @abstractmethod
    def backward_and_update(self, gradient: Tensor, learning_rate: float, moment: Moment) -> None:
        """Backpropagate like `backward`, then take one step of the optimizer."""

    def gather(self, outputs: Tensor) -> Tensor:
        """Return the outputs (M, B, C) of all members from those of the members that run here."""
        return outputs

    def scatter(self, gradient: Tensor) -> Tensor:
        """Return the rows of d objective / d outputs (M, B, C) that belong to the members that run here."""
        return gradient

    def objective_context(self) -> AbstractContextManager[None]:
        """Return the context in which the objective is computed."""
        return nullcontext()


def training_step(
    backend: Backend,
    objective: Objective,
    batch: Batch,
    weights: Tensor | None,
    learning_rate: float,
    step: int,
    moment: Moment = START,
    ensemble_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Train the members of a backend on one batch.

    Args:
        backend: the members to train.
        objective: computed on a detached leaf (M, B, C); its gradient goes back into each member.
        batch: inputs and targets of B samples.
        weights: sample weights (B, M), or None.
        learning_rate: of this step.
        step: counted from 0 over the whole run; stochastic layers derive their random numbers from it.
        moment: when in training this is.
        ensemble_size: the number of all members, if the backend has only some of a separable objective.

    Returns:
        The objective (a scalar) and the outputs (M, B, C), both on the device.
    """

    def gradient_at(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = backend.gather(outputs)
        # predictions of frozen members may be inference tensors, which cannot require a gradient
        outputs = outputs.clone() if outputs.is_inference() else outputs
        with backend.objective_context():
            value, gradient = objective.value_and_gradient(
                outputs, batch.targets, weights, ensemble_size, backend.indices, moment, batch.mix, batch.importance
            )
        return value, outputs, backend.scatter(gradient)

    value, outputs, gradient = gradient_at(backend.forward(batch, step))
    if objective.members.have_second_inputs:
        backend.backward(gradient)
        second_value, _, gradient = gradient_at(backend.forward_second())
        value = value + second_value
    elif objective.members.have_second_weights:
        backend.backward(gradient)
        backend.move_to_second_weights()
        _, _, gradient = gradient_at(backend.forward(batch, step))
    backend.backward_and_update(gradient, learning_rate, moment)
    return value, outputs
