"""Stochastic Multiple Choice Learning: only the best members learn from a sample."""

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
    """Lets only the k members of least loss learn from a sample, so that members specialise.

    The method promises that some member is right, not which; `combine` says how to predict all the same.
    """

    paper = "Lee et al. 2016, Stochastic Multiple Choice Learning for Training Diverse Deep Ensembles"
    formula = "sum of l(h_i, y) over the k members i of least loss on the sample (k = 1: min_i l(h_i, y))"

    k: int = Field(1, ge=1, description="how many members learn from a sample")
    combination: Literal["mean", "max"] = Field(
        "mean", alias="combine", description="mean of the outputs, or for each output the largest of any member"
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
