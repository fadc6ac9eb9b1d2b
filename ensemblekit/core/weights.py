"""Weights of the members, fitted to held-out data by L-BFGS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ensemblekit.core.losses import Loss

MAX_ITERATIONS = 2000


def fit_weights(outputs: Tensor, target: Tensor, loss: Loss, penalty: float | None = None) -> Tensor:
    """Fit the weights of the members that minimise the mean loss of the weighted sum of their outputs.

    Args:
        outputs: members' outputs (M, N, C) for held-out data.
        target: targets of the N samples.
        loss: the loss of the ensemble.
        penalty: None: one non-negative weight for each member, (M, 1), that sum to one. A number: a weight of any sign
            for each member and output, (M, C), with penalty / 2 times their squared distance from 1/M added.

    Returns:
        The weights, in the dtype of the outputs; 1/M each if the search finds nothing better.
    """
    held_out = outputs.detach().double()  # in float32, rounding would stop the search before the optimum
    num_members = len(outputs)
    mean = held_out.new_full((num_members, 1 if penalty is None else outputs.shape[-1]), 1 / num_members)

    def objective(weights: Tensor) -> Tensor:
        combined = (held_out * weights.unsqueeze(1)).sum(dim=0)
        return loss(combined, target).mean() + (penalty or 0.0) / 2 * (weights - mean).square().sum()

    # squares reach zero, which a softmax only approaches
    weights_of = _normalised_squares if penalty is None else _unchanged
    with torch.enable_grad():
        start = mean.sqrt() if penalty is None else mean
        weights = weights_of(_minimise(lambda unconstrained: objective(weights_of(unconstrained)), start))
    return torch.where(objective(weights) <= objective(mean), weights, mean).to(outputs.dtype)


def _normalised_squares(unconstrained: Tensor) -> Tensor:
    return unconstrained.square() / unconstrained.square().sum()


def _unchanged(unconstrained: Tensor) -> Tensor:
    return unconstrained


def _minimise(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Find the minimum of a smooth function of a tensor by L-BFGS, from `start`."""
    unconstrained = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [unconstrained],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        value = function(unconstrained)
        (unconstrained.grad,) = torch.autograd.grad(value, unconstrained)
        return value

    optimizer.step(closure)
    return unconstrained.detach()
