"""How well probabilities are calibrated: scores of them, and the reliability table that they summarise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.core.losses import pick
from ensemblekit.core.metrics import ECE_BINS, brier_score, calibration_error


@dataclass(frozen=True)
class ReliabilityBin:
    """Samples of similar confidence: how confident the ensemble is, and how often it is right."""

    low: float
    high: float
    """Bounds of the confidence: low < confidence ≤ high."""
    count: int
    confidence: float | None
    """The mean; None without samples."""
    accuracy: float | None


def probability_scores(log_probabilities: Tensor, classes: Tensor) -> dict[str, float]:
    """Return nll, ece, adaptive_ece, brier and accuracy of log-probabilities (N, K), float64, and true classes (N,)."""
    probabilities = log_probabilities.exp()
    return {
        "nll": float(-pick(log_probabilities, classes).mean()),
        "ece": float(calibration_error(probabilities, classes)),
        "adaptive_ece": float(adaptive_calibration_error(probabilities, classes)),
        "brier": float(brier_score(probabilities, classes)),
        "accuracy": float((probabilities.argmax(dim=-1) == classes).double().mean()),
    }


def adaptive_calibration_error(probabilities: Tensor, classes: Tensor, bins: int = ECE_BINS) -> Tensor:
    """Return the calibration error with bins of equal mass: |accuracy - confidence|, weighted by their size.

    The samples are sorted by confidence and cut into so many parts, whose sizes differ by one at most.
    """
    confidence, predicted = probabilities.max(dim=-1)
    gap = (predicted == classes).to(confidence.dtype) - confidence
    ordered = gap[confidence.argsort(stable=True)]
    parts = torch.tensor_split(ordered, min(bins, len(ordered)))
    return torch.stack([part.sum().abs() for part in parts]).sum() / len(classes)


def reliability_table(probabilities: Tensor, classes: Tensor, bins: int = ECE_BINS) -> list[ReliabilityBin]:
    """Return the bins of equal width that the expected calibration error is computed from."""
    confidence, predicted = probabilities.max(dim=-1)
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    correct = (predicted == classes).to(confidence.dtype)
    rows = []
    for index in range(bins):
        inside = bin_of == index
        count = int(inside.sum())
        means = (float(confidence[inside].mean()), float(correct[inside].mean())) if count else (None, None)
        rows.append(ReliabilityBin(index / bins, (index + 1) / bins, count, *means))
    return rows
