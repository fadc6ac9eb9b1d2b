"""Split-conformal prediction: sets of classes, or intervals of values, that hold the truth with a chosen probability.

A threshold is fitted to the scores of validation samples, which measure how badly a prediction misses its target. A set
holds every class whose score is within the threshold; the guarantee needs nothing but exchangeable samples.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ensemblekit.core.seeds import derive_seed, generator

CLASS_SCORES = ("lac", "aps", "raps")
VALUE_SCORES = ("absolute", "normalised")
PENALTY, FREE_RANKS = 0.1, 2
"""Of RAPS: what a class adds to the score for each rank beyond the free ones."""
LEAST_SPREAD = 1e-3
"""Least spread of the members, as a share of the median one, that an error is divided by."""


@dataclass(frozen=True)
class Conformal:
    """Fitted prediction sets or intervals."""

    score: str
    """One of `CLASS_SCORES` or `VALUE_SCORES`."""
    error: float
    """The probability α of a miss, at most."""
    thresholds: tuple[float, ...]
    """The quantile of the scores: one, or one for each target of a regression. Infinite: every class, every value."""
    num_samples: int
    """Validation samples that it was fitted to."""
    seed: int = 0
    """That of the run, for the randomised scores."""
    penalty: float = PENALTY
    free_ranks: int = FREE_RANKS
    least_spreads: tuple[float, ...] = ()
    """For each target, what a spread is at least; only for "normalised"."""

    @property
    def is_for_classes(self) -> bool:
        """Whether there are sets of classes, not intervals."""
        return self.score in CLASS_SCORES

    @property
    def description(self) -> str:
        """What it is in a few words: `prediction sets (lac, error at most 0.1)`."""
        what = "prediction sets" if self.is_for_classes else "prediction intervals"
        return f"{what} ({self.score}, error at most {self.error:g})"

    def class_scores(self, probabilities: Tensor, uniform: Tensor) -> Tensor:
        """Return the score of every class (N, K) for probabilities (N, K) and uniform random numbers (N,)."""
        return class_scores(self.score, probabilities, uniform, self.penalty, self.free_ranks)

    def sets(self, probabilities: Tensor, uniform: Tensor) -> Tensor:
        """Return which classes are in the sets, bool (N, K); arguments as for `class_scores`. A set may be empty."""
        return self.class_scores(probabilities, uniform) <= self.thresholds[0]

    def half_widths(self, spreads: Tensor) -> Tensor:
        """Return how far the intervals reach on both sides of a prediction (N, C), for spreads of members (N, C)."""
        thresholds = torch.tensor(self.thresholds, dtype=torch.float64, device=spreads.device)
        if self.score == "absolute":
            return thresholds.expand(spreads.shape)
        return thresholds * at_least(spreads.double(), self.least_spreads)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "thresholds": list(self.thresholds), "least_spreads": list(self.least_spreads)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restore it; a ValueError, KeyError or TypeError if the values are not those of one."""
        score, thresholds = values["score"], tuple(float(value) for value in values["thresholds"])
        if score not in (*CLASS_SCORES, *VALUE_SCORES) or not thresholds:
            raise ValueError(f"score is {score!r:.60} with {len(thresholds)} thresholds")
        return cls(
            score,
            float(values["error"]),
            thresholds,
            int(values["num_samples"]),
            int(values["seed"]),
            float(values["penalty"]),
            int(values["free_ranks"]),
            tuple(float(value) for value in values["least_spreads"]),
        )


def quantile_rank(num_samples: int, error: float) -> int:
    """Return the rank ⌈(n + 1)(1 - α)⌉ of the score that is the threshold; more than n if there are too few samples."""
    # rounded first: (1 - 0.9) · 10 must not count as more than 1
    return math.ceil(round((num_samples + 1) * (1 - error), 9))


def quantile(scores: Tensor, error: float) -> float:
    """Return the threshold for scores (n,): that of `quantile_rank` in ascending order, infinite if there is none."""
    rank = quantile_rank(len(scores), error)
    return math.inf if rank > len(scores) else float(scores.double().sort().values[rank - 1])


def class_scores(
    score: str,
    probabilities: Tensor,
    uniform: Tensor,
    penalty: float = PENALTY,
    free_ranks: int = FREE_RANKS,
) -> Tensor:
    """Return the score of every class (N, K): how little the probabilities (N, K) suggest it.

    Args:
        score: "lac": 1 - p (Sadinle et al. 2019); "aps": the probability of all likelier classes and, times a uniform
            random number, its own (Romano et al. 2020); "raps": that, and a penalty for each rank beyond the free ones
            (Angelopoulos et al. 2021).
        probabilities: (N, K).
        uniform: random numbers in [0, 1) (N,).
        penalty: λ_reg of "raps".
        free_ranks: k_reg of "raps".
    """
    probabilities = probabilities.double()
    if score == "lac":
        return 1 - probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulated = ordered.cumsum(dim=-1) - ordered * (1 - uniform.double().unsqueeze(-1))
    if score == "raps":
        ranks = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
        cumulated = cumulated + penalty * (ranks - free_ranks).clamp_min(0)
    return torch.empty_like(cumulated).scatter(-1, order, cumulated)


def at_least(spreads: Tensor, least: tuple[float, ...]) -> Tensor:
    """Return spreads (N, C) that are no less than the least one of each target."""
    return torch.maximum(spreads, torch.tensor(least, dtype=spreads.dtype, device=spreads.device))


def uniform_by_position(seed: int, split: str, num_samples: int) -> Tensor:
    """Return uniform random numbers (N,) for the samples of a split of a run's data, float64."""
    return torch.rand(num_samples, generator=generator(seed, "conformal", split), dtype=torch.float64)


def uniform_by_input(seed: int, inputs: Tensor) -> Tensor:
    """Return uniform random numbers (B,) that depend on the inputs (B, …) alone: one input always has one set."""
    key = derive_seed(seed, "conformal", "inputs").to_bytes(8)
    rows = inputs.detach().float().cpu().contiguous()
    digests = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8, key=key).digest() for row in rows]
    # the upper 53 bits are a float64 below 1
    return torch.tensor([(int.from_bytes(digest) >> 11) / 2**53 for digest in digests], dtype=torch.float64)
