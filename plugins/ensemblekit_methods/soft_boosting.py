"""Soft gradient boosting: all stages at once, each fitting what the loss still asks for after those before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl
from ensemblekit_methods.boosting import sums_of_those_before

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class SoftBoosting(Method):
    """Fits every member to the negative gradient of the loss at the sum of those before it, all at the same time.

    The residuals r_i are not constants: gradients flow through them, so that earlier members also learn what helps
    those after them. (In `boosting` they never do.) The ensemble is the sum.
    """

    paper = "Feng et al. 2020, Soft Gradient Boosting Machine"
    formula = "sum_i 1/2 ||h_i - r_i||^2,  r_i = -dl/dF at F_{i-1},  F_i = F_{i-1} + shrinkage h_i,  F_0 = 0,  f = F_M"

    shrinkage: float = Field(1.0, gt=0, le=1, description="what each member's output is multiplied by")

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return self.shrinkage * outputs.sum(dim=0)

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        gradient = torch.func.grad(lambda sums: loss(sums, target).sum())
        residuals = -gradient(self.shrinkage * sums_of_those_before(outputs))
        return (outputs - residuals).square().sum(dim=-1) / 2

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if not spec.loss.twice_differentiable:
            what = f'"{self.name}" differentiates the loss\'s gradient, which "{spec.loss.name}" does not allow'
            yield Problem("/training.loss", what, 'use a twice differentiable loss, or the method "boosting"')
        if spec.loss.takes == "probabilities":
            what = f'"{self.name}" starts from outputs of 0, where the gradient of "{spec.loss.name}" is infinite'
            yield Problem("/training.loss", what, 'use loss = "cross_entropy"')
