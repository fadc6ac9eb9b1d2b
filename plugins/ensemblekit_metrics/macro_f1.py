"""The F1 score, averaged over classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class MacroF1(Metric):
    """The mean over classes of the F1 score, in which rare classes count as much as frequent ones.

    A class that is neither present nor predicted is left out.
    """

    formula = "mean over classes of 2 TP / (2 TP + FP + FN)"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        probabilities = loss.probabilities(combined)
        predicted, num_classes = probabilities.argmax(dim=-1), probabilities.shape[-1]
        correct = target[predicted == target].bincount(minlength=num_classes)
        # 2 TP + FP + FN: each sample counts for its own class and for the predicted one
        counted = target.bincount(minlength=num_classes) + predicted.bincount(minlength=num_classes)
        return (2 * correct.double() / counted)[counted > 0].mean()
