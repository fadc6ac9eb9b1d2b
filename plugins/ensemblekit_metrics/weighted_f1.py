"""The F1 score, averaged over samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class WeightedF1(Metric):
    """The mean over classes of the F1 score, weighted by the numbers of their samples."""

    formula = "sum over classes of n_c / N * 2 TP / (2 TP + FP + FN)"
    tasks = ("classification",)
    higher_is_better = True

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        probabilities = loss.probabilities(combined)
        predicted, num_classes = probabilities.argmax(dim=-1), probabilities.shape[-1]
        correct = target[predicted == target].bincount(minlength=num_classes)
        present = target.bincount(minlength=num_classes)
        # 2 TP + FP + FN: each sample counts for its own class and for the predicted one
        counted = present + predicted.bincount(minlength=num_classes)
        return (present * 2 * correct.double() / counted.clamp_min(1)).sum() / len(target)
