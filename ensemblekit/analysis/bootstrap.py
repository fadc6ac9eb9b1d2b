"""The paired bootstrap over test samples: intervals of statistics and of their differences, in bounded memory.

All ensembles see the same resampled test sets, so that what is hard for all of them cancels in a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ensemblekit.core.seeds import generator

RESAMPLES = 2000
"""Enough for the ends of a 95 % interval to a few per cent of its width."""
LEVEL = 0.95
CHUNK_BYTES = 2**25
"""Memory for the counts of the test sets that are resampled at a time."""
KEPT_BYTES = 2**26
"""Resampled test sets up to this size are kept for the next statistic."""
ROUNDING = 1e-6
"""Differences below this share of the values are due to the order of float32 sums."""

Reduction = Callable[[Tensor], Tensor]
"""Computes a statistic (…) from means of features (…, F)."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        """Whether the sign is not known."""
        return self.low <= 0 <= self.high

    def __neg__(self) -> Interval:
        return Interval(0.0 - self.high, 0.0 - self.low)  # never a negative zero


@dataclass(frozen=True)
class SampleStatistic:
    """A statistic of samples: a function of the means of their features."""

    features: Tensor
    """(N, F), or (N,) for F = 1."""
    reduction: Reduction | None = None
    """None for the mean itself."""

    def of_means(self, means: Tensor) -> Tensor:
        """Compute the statistic (…) from means (…, F)."""
        return means.squeeze(-1) if self.reduction is None else self.reduction(means)

    @property
    def matrix(self) -> Tensor:
        """The features (N, F)."""
        return self.features.unsqueeze(-1) if self.features.ndim == 1 else self.features

    def value(self) -> float:
        """Compute the statistic of all samples."""
        return float(self.of_means(self.matrix.double().mean(dim=0)))


def resampled_shares(num_samples: int, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[Tensor]:
    """Yield, in chunks (R', N) of R resamples, the share that each sample has of a test set drawn with replacement."""
    chunk = max(1, CHUNK_BYTES // (4 * num_samples))
    draw = _kept_counts if num_samples * resamples <= KEPT_BYTES else _drawn_counts
    for counts in draw(num_samples, resamples, seed, chunk):
        yield counts.float() / num_samples


@lru_cache(maxsize=2)  # for test and validation data
def _kept_counts(num_samples: int, resamples: int, seed: int, chunk: int) -> list[Tensor]:
    return list(_drawn_counts(num_samples, resamples, seed, chunk))


def _drawn_counts(num_samples: int, resamples: int, seed: int, chunk: int) -> Iterator[Tensor]:
    """Yield how often each sample is drawn, uint8 (R', N); more than 255 times is as good as impossible."""
    random = generator(seed, "bootstrap")
    one = torch.ones(1, dtype=torch.uint8)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        counts = torch.zeros(rows, num_samples, dtype=torch.uint8)
        drawn = torch.randint(num_samples, (rows, num_samples), generator=random)
        yield counts.scatter_add_(1, drawn, one.expand(rows, num_samples))


def resampled(statistics: Sequence[SampleStatistic], resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Compute statistics (R, K) of resampled test sets, the same ones for all K statistics.

    Args:
        statistics: of the same N samples.
        resamples: the number of resampled test sets, R.
        seed: determines these.
    """
    matrices = [statistic.matrix.float() for statistic in statistics]
    rows = []
    for shares in resampled_shares(len(matrices[0]), resamples, seed):
        values = (statistic.of_means(shares @ matrix) for statistic, matrix in zip(statistics, matrices, strict=True))
        rows.append(torch.stack([value.double() for value in values], dim=1))
    return torch.cat(rows)


def centred_interval(estimate: float, values: Tensor, level: float = LEVEL) -> Interval:
    """Return the percentile interval of resampled values (R,), shifted so that their mean is the estimate.

    The shift removes the bias that resampling adds to statistics such as the calibration error or the best member; for
    a mean there is none.
    """
    tail = (1 - level) / 2
    ends = torch.quantile(values - values.mean(), torch.tensor([tail, 1 - tail], dtype=values.dtype))
    return Interval(estimate + float(ends[0]), estimate + float(ends[1]))


def difference_interval(first: float, second: float, values: Tensor, level: float = LEVEL) -> Interval:
    """Return the interval of first - second from resampled values (R,) of the difference."""
    interval = centred_interval(first - second, values, level)
    if max(abs(interval.low), abs(interval.high)) <= ROUNDING * (abs(first) + abs(second)):
        return Interval(0.0, 0.0)
    return interval


def mean_interval(values: Tensor, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the interval of the mean of the samples' values (N,)."""
    statistic = SampleStatistic(values)
    return centred_interval(statistic.value(), resampled([statistic], resamples, seed)[:, 0])
