"""The calibration error in bins of equally many samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ensemblekit import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class AdaptiveECE(Metric):
    """The calibration error in bins of equally many samples, sorted by confidence, instead of equal width.

    Samples of equal confidence count with the mean of their gaps, so that their order does not matter.
    """

    formula = "sum over bins of n_b / N * |accuracy - mean confidence|"
    paper = "Nguyen and O'Connor 2015; Nixon et al. 2019"
    tasks = ("classification",)
    higher_is_better = False

    bins: int = Field(15, ge=1, description="number of bins; with fewer samples there is one for each")

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        probabilities = loss.probabilities(combined.double())
        confidence, order = probabilities.amax(dim=-1).sort()
        correct = (probabilities.argmax(dim=-1) == target)[order].double()
        _, group, sizes = confidence.unique_consecutive(return_inverse=True, return_counts=True)
        gaps = (correct.new_zeros(len(sizes)).index_add(0, group, correct - confidence) / sizes)[group]
        parts = [part.sum().abs() for part in gaps.tensor_split(min(self.bins, len(gaps)))]
        return sum(parts[1:], parts[0]) / len(gaps)
