"""The accuracy in which every class counts the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class BalancedAccuracy(Metric):
    """The mean over classes of the share of their samples that are recognised; a class without samples is left out."""

    formula = "mean over classes of TP / (TP + FN)"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        probabilities = loss.probabilities(combined)
        predicted, num_classes = probabilities.argmax(dim=-1), probabilities.shape[-1]
        correct = target[predicted == target].bincount(minlength=num_classes)
        present = target.bincount(minlength=num_classes)
        return (correct.double() / present)[present > 0].mean()
