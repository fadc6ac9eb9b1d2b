"""The median of the absolute errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemblekit import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class MedianAbsoluteError(Metric):
    """The median of the absolute errors, in the units of the targets; a few large errors hardly change it."""

    formula = "median of |f - y|"
    tasks = ("regression",)
    higher_is_better = False

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return (loss.point(combined) - target).abs().flatten().double().quantile(0.5)
