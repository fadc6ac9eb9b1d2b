"""The negative log-likelihood of the normal distribution that the ensemble predicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ensemblekit import Metric
from ensemblekit_metrics.gaussian import Gaussian, own_variance

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss

SMALLEST_DEVIATION = 1e-6
"""Predicted standard deviations count as at least so many standard deviations of the targets."""
SMALLEST_VARIANCE = 1e-100
"""For constant targets, which have no deviation: small, but its reciprocal is finite."""


class NormalNLL(Metric):
    """The negative log-likelihood of the targets under the ensemble's normal distribution, mean over targets.

    The mean is the ensemble's prediction; the variance is that of the members' predictions, plus their own where the
    loss predicts one. Left out for a single member without a variance of its own. Members that agree exactly would make
    it infinite: a deviation counts as at least a millionth of that of the targets.
    """

    formula = "1/2 log(2 pi v) + (y - m)^2 / (2 v)"
    tasks = ("regression",)
    higher_is_better = False

    def compute(self, outputs: Tensor, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | None:
        if len(outputs) == 1 and own_variance(outputs, loss) is None:
            return None
        predicted = Gaussian.of(outputs, combined, loss)
        target = target.double().reshape(predicted.mean.shape)
        smallest = (SMALLEST_DEVIATION * target.std(dim=0, correction=0)).square()
        variance = predicted.variance.maximum(smallest).clamp_min(SMALLEST_VARIANCE)
        return 0.5 * ((2 * math.pi * variance).log() + (target - predicted.mean).square() / variance).mean()
