"""Selective prediction: the error among the samples that remain if the least confident ones are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RiskCoverage:
    """The risk at each coverage: the share of errors among the k most confident of N samples, for k = 1 … N.

    Samples of equal confidence cannot be told apart, so that each counts with the mean error of all of them. The
    result then does not depend on the order of the samples.
    """

    risk: Tensor
    """Float64 (N,), for the coverages 1/N, 2/N … 1."""
    is_threshold: Tensor
    """Whether a threshold on the confidence keeps exactly so many samples, bool (N,)."""

    @classmethod
    def of(cls, confidence: Tensor, wrong: Tensor) -> RiskCoverage:
        """Compute the curve from the confidence in each prediction (N,) and whether it is wrong (N,)."""
        ordered, order = confidence.sort(descending=True)
        _, group, sizes = ordered.unique_consecutive(return_inverse=True, return_counts=True)
        errors = torch.zeros(len(sizes), dtype=torch.float64, device=wrong.device)
        errors.index_add_(0, group, wrong[order].double())
        counts = torch.arange(1, len(ordered) + 1, device=wrong.device)
        is_threshold = torch.zeros_like(counts, dtype=torch.bool)
        is_threshold[sizes.cumsum(0) - 1] = True
        return cls((errors / sizes)[group].cumsum(0) / counts, is_threshold)

    @property
    def area(self) -> Tensor:
        """The area under the curve (AURC): the mean of the risks at all coverages."""
        return self.risk.mean()

    def risk_at(self, coverage: float) -> Tensor:
        """Return the risk if at least this share of the samples is answered."""
        return self.risk[max(math.ceil(round(coverage * len(self.risk), 9)), 1) - 1]

    def coverage_at(self, risk: float) -> Tensor:
        """Return the largest coverage of a threshold with at most this risk; 0 if there is none."""
        allowed = (self.is_threshold & (self.risk <= risk + 1e-12)).nonzero()  # 1e-12: the rounding of sums
        return (allowed.max() + 1 if len(allowed) else torch.zeros(())).double() / len(self.risk)
