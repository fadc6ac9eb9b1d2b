"""The continuous ranked probability score of the normal distribution that the ensemble predicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ensemblekit import Metric
from ensemblekit_metrics.gaussian import Gaussian

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


class CRPS(Metric):
    """The continuous ranked probability score of the ensemble's normal distribution, in the units of the targets.

    The mean is the ensemble's prediction; the variance is that of the members' predictions, plus their own where the
    loss predicts one. Without any variance it is the absolute error.
    """

    formula = "s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)), z = (y - m) / s"
    paper = "Gneiting and Raftery 2007, eq. 21"
    tasks = ("regression",)
    higher_is_better = False

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        predicted = Gaussian.of(outputs, combined, loss)
        error = target.double().reshape(predicted.mean.shape) - predicted.mean
        deviation = predicted.variance.sqrt()
        z = error / deviation.clamp_min(torch.finfo(deviation.dtype).tiny)
        density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
        # s z is the error itself, which stays exact where s is 0
        score = error * torch.erf(z / math.sqrt(2)) + deviation * (2 * density - 1 / math.sqrt(math.pi))
        return score.mean()
