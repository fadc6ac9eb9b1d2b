"""Gradient boosting: every member corrects the sum of the members before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import GrowingEnsemble, Loss, Spec


def preceding_sums(outputs: Tensor) -> Tensor:
    """Compute for each member the sum of the outputs of the members before it, (M, B, C); zero for the first."""
    sums = outputs.cumsum(dim=0)
    return torch.cat([torch.zeros_like(sums[:1]), sums[:-1]])


def first_epochs(num_epochs: int, num_members: int) -> list[int]:
    """Return the first epoch of each stage, if members are trained one by one; the shares differ by at most one."""
    return [1 + stage * num_epochs // num_members for stage in range(num_members)]


class Boosting(Method):
    """Trains every member to correct the sum of the members before it; the ensemble's output is the sum of all.

    A member is one stage of the boosting. Schedule `joint` trains all stages at the same time, without gradients from a
    stage to earlier ones. Schedule `stagewise` trains one stage after the other, each for its share of the epochs; the
    earlier ones are frozen.
    """

    paper = "Friedman 2001, Greedy Function Approximation: A Gradient Boosting Machine"
    formula = "sum_i l(F_i, y),  F_i = stop_gradient(F_{i-1}) + shrinkage h_i,  F_0 = 0,  f = F_M"

    shrinkage: float = Field(1.0, gt=0, le=1, description="factor of each member's output")
    schedule: Literal["joint", "stagewise"] = Field(
        "joint", description="train all stages at once, or one after the other"
    )

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return self.shrinkage * outputs.sum(dim=0)

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        preceding = preceding_sums(outputs.detach())
        return loss(self.shrinkage * (preceding + outputs), target)

    @hookimpl
    def select_members(self, outputs: Tensor, num_members: int) -> Tensor | None:
        if self.schedule == "joint":
            return None
        stage = torch.arange(num_members, device=outputs.device)
        return (stage == num_members - 1).unsqueeze(-1)  # only the newest stage is trained

    @hookimpl
    def members_at_start(self) -> int | None:
        return 1 if self.schedule == "stagewise" else None

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int) -> None:
        if self.schedule == "stagewise" and epoch in first_epochs(num_epochs, num_members)[1:]:
            ensemble.freeze(len(ensemble) - 1)
            ensemble.grow()

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.loss.takes == "probabilities":
            what = f'"{self.name}" adds up the outputs, and sums are not probabilities, which "{spec.loss.name}" takes'
            yield Problem("/training.loss", what, 'use loss = "cross_entropy"')
        members, epochs = spec.ensemble.members, spec.training.epochs
        if self.schedule == "stagewise" and epochs < members:
            what = f'"stagewise" needs at least one epoch for each of {members} members, but there are only {epochs}'
            yield Problem("schedule", what, f"set training.epochs to {members} or more")
