"""The share of targets in the ensemble's prediction intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import Metric
from ensemblekit_metrics.gaussian import Gaussian

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class IntervalCoverage(Metric):
    """The share of targets in the central interval of the ensemble's normal distribution; at best equal to `level`.

    The mean is the ensemble's prediction; the variance is that of the members' predictions, plus their own where the
    loss predicts one. The spread of members alone usually covers too little.
    """

    formula = "mean of 1{|y - m| <= Phi^-1((1 + level) / 2) s}"
    tasks = ("regression",)

    level: float = Field(0.9, gt=0, lt=1, description="probability of the interval under the normal distribution")

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        predicted = Gaussian.of(outputs, combined, loss)
        error = (target.double().reshape(predicted.mean.shape) - predicted.mean).abs()
        width = torch.special.ndtri(error.new_tensor((1 + self.level) / 2))
        return (error <= width * predicted.variance.sqrt()).double().mean()
