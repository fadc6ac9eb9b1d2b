"""Gradient boosting: every member corrects the sum of those before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import GrowingEnsemble, Loss, Spec


def sums_of_those_before(outputs: Tensor) -> Tensor:
    """For each member the sum of the outputs of the members before it, (M, B, C); zero for the first."""
    sums = outputs.cumsum(dim=0)
    return torch.cat([torch.zeros_like(sums[:1]), sums[:-1]])


class Boosting(Method):
    """Lets every member correct the sum of those before it; the ensemble is that sum.

    Schedule `joint` trains all stages in one pass. Schedule `stagewise` gives each stage its own share of the
    epochs while the earlier ones are frozen; a new stage never disturbs them.
    """

    paper = "Friedman 2001, Greedy Function Approximation: A Gradient Boosting Machine"
    formula = "sum_i l(F_i, y),  F_i = stop_gradient(F_{i-1}) + shrinkage h_i,  F_0 = 0,  f = F_M"

    shrinkage: float = Field(1.0, gt=0, le=1, description="what each member's output is multiplied by")
    schedule: Literal["joint", "stagewise"] = Field("joint", description="all stages at once, or one after the other")

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return self.shrinkage * outputs.sum(dim=0)

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        before = sums_of_those_before(outputs.detach())
        return loss(self.shrinkage * (before + outputs), target)

    @hookimpl
    def select_members(self, outputs: Tensor, num_members: int) -> Tensor | None:
        if self.schedule == "joint":
            return None
        stage = torch.arange(num_members, device=outputs.device)
        return (stage == num_members - 1).unsqueeze(-1)  # the newest stage learns

    @hookimpl
    def members_at_start(self) -> int | None:
        return 1 if self.schedule == "stagewise" else None

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble, epoch: int, num_epochs: int, num_members: int) -> None:
        if self.schedule == "stagewise" and epoch in self._first_epochs(num_epochs, num_members)[1:]:
            ensemble.freeze(len(ensemble) - 1)
            ensemble.grow()

    @staticmethod
    def _first_epochs(num_epochs: int, num_members: int) -> list[int]:
        """The epoch with which each stage starts; shares differ by one epoch at most."""
        return [1 + stage * num_epochs // num_members for stage in range(num_members)]

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        members, epochs = spec.ensemble.members, spec.training.epochs
        if self.schedule == "stagewise" and epochs < members:
            what = f'"stagewise" gives each of {members} members its own epochs, but there are only {epochs}'
            yield Problem("schedule", what, f"set training.epochs to {members} or more")
