"""The calibration error of the probability of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class ClasswiseECE(Metric):
    """The calibration error of the probability of each class, not only of the predicted one, averaged over classes."""

    formula = "1/C sum over classes and bins of n_b / N * |share of class c - mean p_c|"
    paper = "Kull et al. 2019"
    tasks = ("classification",)
    higher_is_better = False

    bins: int = Field(15, ge=1, description="number of bins of equal width")

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        probabilities = loss.probabilities(combined.double())
        num_samples, num_classes = probabilities.shape
        gaps = -probabilities
        gaps[range(num_samples), target] += 1
        # bins are open on the left, (a, b], as those of ece
        bin_of = (probabilities * self.bins).ceil().long().clamp(1, self.bins) - 1
        sums = gaps.new_zeros(self.bins, num_classes).scatter_add(0, bin_of, gaps)
        return sums.abs().sum() / (num_samples * num_classes)
