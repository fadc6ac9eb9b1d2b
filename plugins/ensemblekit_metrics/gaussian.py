"""The normal distribution that an ensemble predicts in regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit import Loss


@dataclass(frozen=True)
class Gaussian:
    """Mean and variance of the prediction of each target, float64 (N, T)."""

    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, outputs: Tensor, combined: Tensor, loss: Loss) -> Gaussian:
        """Return the ensemble's normal distribution.

        Its mean is the ensemble's prediction. Its variance is that of the members' predictions, plus the mean of the
        members' own variances if the loss has them: the variance of the mixture of the members' distributions.

        Args:
            outputs: the members' outputs (M, N, C).
            combined: the ensemble's output (N, C).
            loss: its slice `variance` or `log_variance`, if it has one, is a variance of each target.
        """
        outputs = outputs.double()
        variance = loss.point(outputs).var(dim=0, correction=0)
        own = own_variance(outputs, loss)
        return cls(loss.point(combined.double()), variance if own is None else variance + own.mean(dim=0))


def own_variance(outputs: Tensor, loss: Loss) -> Tensor | None:
    """Return the variances (M, N, T) that the members themselves predict; None if the loss has no such outputs."""
    start = 0
    for name, size in loss.slices(outputs.shape[-1]).items():
        if name in ("variance", "log_variance"):
            values = outputs[..., start : start + size]
            return values.exp() if name == "log_variance" else values
        start += size
    return None
