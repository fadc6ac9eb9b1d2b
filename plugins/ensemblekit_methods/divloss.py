"""DivLoss: the cross-entropy between members is a reward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import Method, Problem, hookimpl
from ensemblekit_methods.pairwise_divergence import cross_entropy_to_others

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import DataInfo, Loss, Spec


class DivLoss(Method):
    """Adds up the ensemble's and the members' losses and rewards the cross-entropy between members."""

    paper = "Opitz et al. 2017, Efficient Model Averaging for Deep Neural Networks, eq. 15"
    formula = (
        "l(f, y) + (lambda1 / M) sum_i l(h_i, y) - (lambda2 / (M (M - 1))) sum_i sum_{j != i} CE(h_i, softmax(h_j))"
    )

    lambda1: float = Field(1.0, ge=0, description="weight of the members' losses")
    lambda2: float = Field(0.1, ge=0, description="weight of the cross-entropy between members")

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        losses = self.lambda1 / num_members * loss(outputs, target)
        pairs = max(num_members * (num_members - 1), 1)  # the sum is empty for a single member
        return losses - self.lambda2 / pairs * cross_entropy_to_others(outputs)

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined, target)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.loss.takes in ("probabilities", "margins", "labels"):
            what = f'"{self.name}" needs logits as outputs, but with "{spec.loss.name}" they are {spec.loss.takes}'
            yield Problem("/training.loss", what, 'use loss = "cross_entropy"')

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if self.lambda2 > 0 and spec.loss.takes != "margins" and spec.loss.num_outputs(info) == 1:
            what = f"{self.lambda2:g} has no effect: the cross-entropy between members is 0 with a single output"
            yield Problem("lambda2", what, 'set lambda2 = 0, or use the method "ncl"')
