"""The area under the ROC curve, one class against the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Metric, auroc

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class AUROC(Metric):
    """The mean over classes of the area under the ROC curve, each class against all others.

    A class without samples is left out; if all samples are of one class, the metric is left out.
    """

    formula = "mean over classes of P(p_c of a sample of class c > p_c of another sample)"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> float | None:
        probabilities = loss.probabilities(combined.double())
        present = target.unique().tolist()
        if len(present) < 2:
            return None
        areas = [float(auroc(probabilities[:, label], target == label)) for label in present]
        return sum(areas) / len(areas)
