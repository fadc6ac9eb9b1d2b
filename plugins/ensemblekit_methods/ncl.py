"""Negative Correlation Learning for the squared error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import MSE, Method, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Spec


class NCL(Method):
    """Rewards members for deviating from the ensemble's output, in terms of the squared error.

    It always uses the squared error (to one-hot targets for classes) instead of `training.loss`; `gncl` with
    mode "exact" is the same idea for any loss.
    """

    paper = "Liu and Yao 1999, Ensemble learning via negative correlation; Brown et al. 2005, eq. 17"
    formula = "(1/M) sum_i [ 1/2 ||h_i - y||^2 - lambda 1/2 ||h_i - f||^2 ]"

    lam: float = Field(0.5, alias="lambda", ge=0, description="weight of the members' deviation from the ensemble")

    @hookimpl
    def member_loss(self, outputs: Tensor, combined: Tensor, target: Tensor, num_members: int) -> Tensor:
        spread = 0.5 * (outputs - combined).square().sum(dim=-1)
        return (MSE()(outputs, target) - self.lam * spread) / num_members

    def notes(self, spec: Spec) -> Iterable[str]:
        if self.lam > 1:
            yield (
                f'the objective of "{self.name}" has no minimum with lambda = {self.lam:g}: members may drift apart '
                "without limit. A lambda of at most 1 prevents that."
            )
