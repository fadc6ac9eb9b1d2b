"""The average precision, one class against the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Metric, average_precision

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class AveragePrecision(Metric):
    """The mean over classes of the area under the precision-recall curve, each class against all others.

    A class without samples is left out.
    """

    formula = "mean over classes of sum_k (R_k - R_(k-1)) P_k over thresholds k"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> float:
        probabilities = loss.probabilities(combined.double())
        areas = [float(average_precision(probabilities[:, label], target == label)) for label in target.unique()]
        return sum(areas) / len(areas)
