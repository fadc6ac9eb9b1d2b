"""How much the difference between two groups of runs varies with their seeds: Student's t, as seeds are few.

Resampling two or three seeds would understate how much they vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.analysis.bootstrap import RESAMPLES
from ensemblekit.core.seeds import generator

FEW = 3
"""Groups with fewer seeds than this borrow the variance of all groups: with two seeds an interval of their own would be
twelve standard errors to each side."""


@dataclass(frozen=True)
class PooledVariance:
    """The variance between runs of one group, from all groups together."""

    variance: float
    freedom: int
    """Degrees of freedom; 0 if no group has two runs."""

    @classmethod
    def of(cls, values: Sequence[Sequence[float]], same_seeds: bool) -> PooledVariance:
        """Compute it from a value for each run of each group.

        Args:
            values: by group and run.
            same_seeds: whether all groups have the same seeds in the same order. What a seed does to all of them is
                then not counted, as it cancels in differences (a randomised block design).
        """
        groups = [torch.tensor(group, dtype=torch.float64) for group in values]
        residuals = [group - group.mean() for group in groups]
        freedom = sum(len(group) - 1 for group in groups)
        if same_seeds:
            effect = torch.stack(residuals).mean(dim=0)
            residuals = [residual - effect for residual in residuals]
            freedom -= len(effect) - 1
        total = sum(float(residual.square().sum()) for residual in residuals)
        return cls(total / freedom if freedom else 0.0, freedom)


def difference_deviations(
    first: Sequence[float],
    second: Sequence[float],
    pooled: PooledVariance,
    same_seeds: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Tensor | None:
    """Sample deviations (R,) of the difference between the means of two groups; None if no group has two runs.

    Args:
        first: a value for each run of a group.
        second: those of another group.
        pooled: the variance of all groups, for groups of fewer than three runs.
        same_seeds: whether both have runs with the same seeds in the same order, which are compared pair by pair.
        resamples: the number of samples, R.
        seed: determines these.
    """
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (first, second))
    if min(len(a), len(b)) < FEW:
        variance, freedom = pooled.variance * (1 / len(a) + 1 / len(b)), pooled.freedom
        own = [float(group.var()) / len(group) for group in (a, b) if len(group) > 1 and not same_seeds]
        variance = max(variance, *own) if own else variance
    elif same_seeds:
        variance, freedom = float((a - b).var()) / len(a), len(a) - 1
    else:  # Welch's test, with the degrees of freedom of Satterthwaite
        parts = [float(group.var()) / len(group) for group in (a, b)]
        variance = sum(parts)
        spread = sum(part**2 / (len(group) - 1) for part, group in zip(parts, (a, b), strict=True))
        freedom = int(variance**2 / spread) if spread > 0 else len(a) + len(b) - 2
    return None if freedom == 0 else variance**0.5 * student_t(freedom, resamples, seed)


def student_t(freedom: int, resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Sample Student's t distribution (R,)."""
    random = generator(seed, "seeds of a bootstrap")
    normal = torch.randn(resamples, generator=random, dtype=torch.float64)
    chi_squared = torch.randn(resamples, freedom, generator=random, dtype=torch.float64).square().sum(dim=1)
    return normal / (chi_squared / freedom).sqrt()
