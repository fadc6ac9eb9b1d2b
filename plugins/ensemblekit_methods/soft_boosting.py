"""Soft gradient boosting: all stages are trained at once, each on the residuals of the stages before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl
from ensemblekit_methods.boosting import preceding_sums

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class SoftBoosting(Method):
    """Fits every member to the negative gradient of the loss at the sum of the members before it, all at once.

    Gradients flow through the residuals r_i, so that earlier members also learn to help later ones; in `boosting` they
    do not. The ensemble's output is the sum of all members.
    """

    paper = "Feng et al. 2020, Soft Gradient Boosting Machine"
    formula = "sum_i 1/2 ||h_i - r_i||^2,  r_i = -dl/dF at F_{i-1},  F_i = F_{i-1} + shrinkage h_i,  F_0 = 0,  f = F_M"

    shrinkage: float = Field(1.0, gt=0, le=1, description="factor of each member's output")

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return self.shrinkage * outputs.sum(dim=0)

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        gradient = torch.func.grad(lambda sums: loss(sums, target).sum())
        residuals = -gradient(self.shrinkage * preceding_sums(outputs))
        return (outputs - residuals).square().sum(dim=-1) / 2

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if not spec.loss.twice_differentiable:
            what = f'"{self.name}" needs a twice differentiable loss, but "{spec.loss.name}" is not'
            yield Problem("/training.loss", what, 'use a twice differentiable loss, or the method "boosting"')
        if spec.loss.takes == "probabilities":
            what = f'"{self.name}" starts at outputs of 0, where the gradient of "{spec.loss.name}" is infinite'
            yield Problem("/training.loss", what, 'use loss = "cross_entropy"')
