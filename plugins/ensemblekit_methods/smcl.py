"""Stochastic Multiple Choice Learning: each sample trains only its best members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss, Spec


class SMCL(Method):
    """Trains only the k members with the lowest loss on each sample, so that members specialise.

    The objective makes some member right on each sample, not the average; `combine` selects how they predict together.
    """

    paper = "Lee et al. 2016, Stochastic Multiple Choice Learning for Training Diverse Deep Ensembles"
    formula = "sum of l(h_i, y) over the k members i with the lowest loss on the sample (k = 1: min_i l(h_i, y))"

    k: int = Field(1, ge=1, description="number of members that are trained on a sample")
    combination: Literal["mean", "max"] = Field(
        "mean", alias="combine", description="mean over the members, or maximum over the members for each output"
    )

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return outputs.mean(dim=0) if self.combination == "mean" else outputs.amax(dim=0)

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target)

    @hookimpl
    def select_members(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        losses = loss(outputs.detach(), target)
        best = losses.topk(min(self.k, num_members), dim=0, largest=False).indices
        return torch.zeros_like(losses, dtype=torch.bool).scatter(0, best, True)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if self.k > spec.ensemble.members:
            yield Problem("k", f"{self.k}, but there are {spec.ensemble.members} members", "lower k, or add members")
        if self.combination == "max" and spec.loss.takes == "probabilities":
            what = f'the largest of several probabilities do not sum to 1, but "{spec.loss.name}" takes probabilities'
            yield Problem("combine", what, 'set combine = "mean", or another training.loss')
