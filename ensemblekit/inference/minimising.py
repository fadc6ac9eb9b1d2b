"""The minimisations behind calibration: a temperature in one dimension, and logistic regression by Newton's method."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

REACH = 1e3
"""Temperatures are searched from 1/REACH to REACH times the spread of the logits."""
GRID = 13
TOLERANCE = 1e-12
"""Of the logarithm of a temperature, and of the derivative by it."""
NO_LOSS = 1e-12
"""A likelihood that is as good as that of certainty."""
Likelihood = Callable[[Tensor], Tensor]
"""The negative log-likelihood at a temperature, a scalar tensor that it can be differentiated by."""


def minimise_temperature(nll: Likelihood, spread: float) -> float | None:
    """Return the temperature T > 0 with the least negative log-likelihood.

    The problem is convex in 1/T for softmax(f / T). That of a mixture need not be: a grid finds the valley.

    Args:
        nll: what is minimised.
        spread: how far the logits of a sample are apart. A search relative to it finds s · T for logits times s.

    Returns:
        The temperature; the highest of the search if the logits say nothing about the classes; None if the likelihood
        grows down to a temperature of 0, as it does if every sample is predicted right.
    """

    def slope(log_temperature: float) -> float:
        """Return the derivative of the NLL by the logarithm of T."""
        variable = torch.tensor(log_temperature, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(nll(variable.exp()), variable)
        return float(gradient)

    centre = math.log(spread) if spread > 0 else 0.0
    step = 2 * math.log(REACH) / (GRID - 1)
    grid = [centre - math.log(REACH) + step * index for index in range(GRID)]
    with torch.no_grad():
        values = [float(nll(torch.tensor(point, dtype=torch.float64).exp())) for point in grid]
    best = min(range(GRID), key=values.__getitem__)
    if best == 0 or values[best] < NO_LOSS:
        return None
    if best == GRID - 1:
        return math.exp(grid[best])
    middle = slope(grid[best])
    ends = (best - 1, best) if middle > 0 else (best, best + 1)
    low, high = ((grid[end], middle if end == best else slope(grid[end])) for end in ends)
    return math.exp(_root(slope, low, high))


def _root(function: Callable[[float], float], low: tuple[float, float], high: tuple[float, float]) -> float:
    """Return where a function changes its sign from - to +, by regula falsi with the Illinois rule, else bisection."""
    kept = 0
    for _ in range(100):
        (left, at_left), (right, at_right) = low, high
        point = (left + right) / 2
        if at_left < 0 < at_right:
            point = min(max(left - at_left * (right - left) / (at_right - at_left), left), right)
        value = function(point)
        if abs(value) < TOLERANCE or right - left < TOLERANCE or point in (left, right):
            return point
        # an end that stays for the second time counts half, so that it moves too
        if value > 0:
            high, low = (point, value), (left, at_left / 2 if kept == 1 else at_left)
            kept = 1
        else:
            low, high = (point, value), (right, at_right / 2 if kept == -1 else at_right)
            kept = -1
    return point


def logistic_regression(features: Tensor, positive: Tensor, ridge: float = 1e-6, steps: int = 200) -> Tensor:
    """Fit a logistic regression by Newton's method with halved steps.

    Args:
        features: (N, F).
        positive: whether a sample is of the class (N,).
        ridge: weight of the squared coefficients beside the sum of the losses, which keeps them finite for data that
            can be separated.
        steps: most steps.

    Returns:
        The coefficients of the features and, last, the intercept (F + 1,).
    """
    design = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
    signs = torch.where(positive, 1.0, -1.0).double()
    weights = torch.zeros(design.shape[1], dtype=torch.float64)

    def value(candidate: Tensor) -> Tensor:
        return -functional.logsigmoid(signs * (design @ candidate)).sum() + ridge * candidate.square().sum() / 2

    current = value(weights)
    for _ in range(steps):
        share = torch.sigmoid(-signs * (design @ weights))
        gradient = -design.T @ (signs * share) + ridge * weights
        curvature = (design * (share * (1 - share)).unsqueeze(1)).T @ design
        direction = torch.linalg.solve(curvature + ridge * torch.eye(len(weights), dtype=torch.float64), gradient)
        size = 1.0
        while size > 1e-8 and not value(weights - size * direction) <= current:
            size /= 2
        weights = weights - size * direction
        previous, current = current, value(weights)
        if float(direction.abs().max()) * size < 1e-12 or float(previous - current) < 1e-14 * float(current.abs() + 1):
            break
    return weights
