"""The minimisations behind calibration: a temperature in one dimension, and logistic regression by Newton's method."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

REACH = 1e3
"""Temperatures are searched from 1/REACH to REACH times the spread of the logits."""
GRID = 19
TOLERANCE = 1e-11
"""Of the logarithm of a temperature."""
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

    def slope(log_temperature: float) -> tuple[float, float]:
        """Return the NLL and its derivative by the logarithm of T."""
        variable = torch.tensor(log_temperature, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = nll(variable.exp())
            (gradient,) = torch.autograd.grad(value, variable)
        return float(value.detach()), float(gradient)

    centre = math.log(spread) if spread > 0 else 0.0
    step = 2 * math.log(REACH) / (GRID - 1)
    grid = [centre - math.log(REACH) + step * index for index in range(GRID)]
    found = [slope(point) for point in grid]
    best = min(range(GRID), key=lambda index: found[index][0])
    if best == 0 or found[best][0] < NO_LOSS:
        return None
    if best == GRID - 1:
        return math.exp(grid[best])
    low, high = (best - 1, best) if found[best][1] > 0 else (best, best + 1)
    return math.exp(_root(lambda point: slope(point)[1], (grid[low], found[low][1]), (grid[high], found[high][1])))


def _root(function: Callable[[float], float], low: tuple[float, float], high: tuple[float, float]) -> float:
    """Return where a function changes its sign, by bisection and regula falsi in turns."""
    for turn in range(200):
        (left, at_left), (right, at_right) = low, high
        if right - left < TOLERANCE or at_left == 0 or at_right == 0:
            break
        middle = (left + right) / 2
        if turn % 3 and at_left < 0 < at_right:
            # a little towards the middle of the secant's root, so that both ends of the bracket close in
            secant = left - at_left * (right - left) / (at_right - at_left)
            middle = min(max(secant + (middle - secant) * 1e-4, left), right)
        value = function(middle)
        if value > 0:
            high = (middle, value)
        else:
            low = (middle, value)
    return min((low, high), key=lambda end: abs(end[1]))[0]


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
