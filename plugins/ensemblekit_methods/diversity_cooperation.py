"""Diversity with Cooperation: a penalty on every pair of members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ensemblekit import Method, Problem, hookimpl
from ensemblekit_methods.pairwise_divergence import cosine_to_others, cross_entropy_to_others, symmetric_kl_to_others

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import DataInfo, Loss, Spec


class DiversityCooperation(Method):
    """Adds a penalty for pairs of members that agree on wrong classes (diversity) or that disagree (cooperation).

    The penalty psi of two members is `cosine`, the similarity of their probabilities without the true class; `kl`, the
    mean of the two Kullback-Leibler divergences; or `cross_entropy`, -CE(h_i, softmax(h_j)) as in DivLoss.
    """

    paper = "Dvornik et al. 2019, Diversity with Cooperation: Ensemble Methods for Few-Shot Classification"
    formula = "sum_i l(h_i, y) + (lambda / (M - 1)) sum_i sum_{j != i} psi(h_i, h_j)"

    lam: float = Field(0.1, alias="lambda", ge=0, description="weight of the penalty")
    penalty: Literal["cosine", "kl", "cross_entropy"] = Field(
        "cosine", description="cosine and cross_entropy push members apart, kl pulls them together"
    )

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        others = max(num_members - 1, 1)  # the sum is empty for a single member
        return loss(outputs, target) + self.lam / others * self._penalty(outputs, target)

    def _penalty(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.penalty == "cosine":
            return cosine_to_others(outputs, target)
        if self.penalty == "kl":
            return symmetric_kl_to_others(outputs)
        return -cross_entropy_to_others(outputs)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.loss.takes in ("probabilities", "margins", "labels"):
            what = f'"{self.name}" needs logits as outputs, but with "{spec.loss.name}" they are {spec.loss.takes}'
            yield Problem("/training.loss", what, 'use loss = "cross_entropy"')
        if spec.data.info is None and spec.data.known_task == "regression":
            yield self._only_for_classes()

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.task == "regression":
            yield self._only_for_classes()

    def _only_for_classes(self) -> Problem:
        return Problem("name", f'"{self.name}" is for classification only', 'use "ncl" for regression')
