"""Metrics of an ensemble: pure functions of the members' outputs (M, N, C)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.decomposition import decompose
from ensemblekit.core.losses import Loss

ECE_BINS = 15
METRIC_GROUPS: dict[str, tuple[str, ...]] = {
    "ensemble": ("loss", "accuracy", "nll", "ece", "brier", "entropy", "mse", "rmse", "mae", "r2", "standardised_mse"),
    "members": (
        "mean_member_loss",
        "mean_member_accuracy",
        "best_member_accuracy",
        "worst_member_accuracy",
        "oracle_accuracy",
        "mean_member_mse",
        "best_member_mse",
        "worst_member_mse",
    ),
    "spread": ("diversity", "remainder", "disagreement", "mutual_information"),
}
"""Every metric, by what it describes: the ensemble, its members by themselves, or how they differ."""


def metric_group(name: str) -> str:
    """Return the group of a metric; a metric without a group is one of the ensemble."""
    return next((group for group, names in METRIC_GROUPS.items() if name in names), "ensemble")


@torch.no_grad()
def evaluate(
    outputs: Tensor, target: Tensor, loss: Loss, combined: Tensor | None = None, target_std: Tensor | None = None
) -> dict[str, float]:
    """Compute all metrics of member outputs (M, N, C); `combined` (N, C) is the ensemble's output, else the mean.

    If real targets were standardised, `target_std` (C,) gives the errors in their original units.
    """
    if combined is None:
        combined = outputs.mean(dim=0)
    parts = decompose(outputs, target, loss)
    metrics = {
        "loss": loss(combined, target).mean(),
        "mean_member_loss": parts.mean_member_loss,
        "diversity": parts.diversity,
        "remainder": parts.remainder,
    }
    if loss.takes == "values" and (target.is_floating_point() or target.ndim > 1 or outputs.shape[-1] == 1):
        metrics |= regression_metrics(outputs, combined, target, target_std)
    else:
        classes = target.flatten() > 0 if loss.takes == "margins" else target
        probabilities = loss.probabilities(combined.double())  # float32 would cut off the log-likelihood at 87
        metrics |= classification_metrics(loss.probabilities(outputs), probabilities, classes.long())
    return {name: float(value) for name, value in metrics.items()}


def flat_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Name the metrics of the test data as runs do: `test_accuracy`, but `mean_member_accuracy`."""
    return {name if metric_group(name) == "members" else f"test_{name}": value for name, value in metrics.items()}


@torch.no_grad()
def member_metrics(
    outputs: Tensor, target: Tensor, loss: Loss, target_std: Tensor | None = None
) -> list[dict[str, Any]]:
    """Compute loss, and accuracy or squared error, of each member by itself, from outputs (M, N, C)."""
    names = ("loss", "accuracy", "mse")
    rows = []
    for index, member_outputs in enumerate(outputs):
        metrics = evaluate(member_outputs.unsqueeze(0), target, loss, target_std=target_std)
        rows.append({"index": index, **{name: metrics[name] for name in names if name in metrics}})
    return rows


def classification_metrics(member_probabilities: Tensor, probabilities: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Compute accuracy, calibration and disagreement from (M, N, K), (N, K) and class indices (N,)."""
    predictions = member_probabilities.argmax(dim=-1)
    correct = predictions == classes
    member_accuracy = correct.double().mean(dim=1)
    entropy = _entropy(probabilities)
    return {
        "accuracy": (probabilities.argmax(dim=-1) == classes).double().mean(),
        "nll": negative_log_likelihood(probabilities, classes),
        "ece": calibration_error(probabilities, classes),
        "brier": brier_score(probabilities, classes),
        "mean_member_accuracy": member_accuracy.mean(),
        "best_member_accuracy": member_accuracy.max(),
        "worst_member_accuracy": member_accuracy.min(),
        "oracle_accuracy": correct.any(dim=0).double().mean(),
        "disagreement": disagreement(predictions, probabilities.shape[-1]),
        "entropy": entropy.mean(),
        "mutual_information": mutual_information(member_probabilities).mean(),
    }


def regression_metrics(
    outputs: Tensor, combined: Tensor, target: Tensor, target_std: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute errors and R² from (M, N, C), (N, C) and real targets (N,) or (N, C).

    With `target_std` (C,), outputs and targets are standardised by it, and errors are in the original units.
    """
    outputs, combined = outputs.double(), combined.double()
    target = target.reshape(combined.shape).double()
    unit = torch.ones((), device=target.device) if target_std is None else target_std.to(target)
    errors = (combined - target) * unit
    mse = errors.square().mean()
    member_mse = ((outputs - target) * unit).square().mean(dim=(1, 2))
    metrics = {
        "mse": mse,
        "rmse": mse.sqrt(),
        "mae": errors.abs().mean(),
        "r2": r2_score(combined, target),
        "mean_member_mse": member_mse.mean(),
        "best_member_mse": member_mse.min(),
        "worst_member_mse": member_mse.max(),
    }
    return metrics if target_std is None else metrics | {"standardised_mse": (combined - target).square().mean()}


def negative_log_likelihood(probabilities: Tensor, classes: Tensor) -> Tensor:
    """Return the mean of -log p of the true class."""
    likelihood = probabilities.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    return -likelihood.clamp_min(torch.finfo(likelihood.dtype).tiny).log().mean()


def brier_score(probabilities: Tensor, classes: Tensor) -> Tensor:
    """Return the mean squared distance between probabilities and one-hot targets, summed over classes (0 to 2)."""
    truth = torch.nn.functional.one_hot(classes, probabilities.shape[-1])
    return (probabilities - truth).square().sum(dim=-1).mean()


def calibration_error(probabilities: Tensor, classes: Tensor, bins: int = ECE_BINS) -> Tensor:
    """Return the expected calibration error: |accuracy - confidence| in bins of equal width, weighted by their size."""
    confidence, predicted = probabilities.max(dim=-1)
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1  # bins are open on the left: (a, b]
    gap = (predicted == classes).to(confidence.dtype) - confidence
    sums = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device).index_add(0, bin_of, gap)
    return sums.abs().sum() / len(classes)


def disagreement(predictions: Tensor, num_classes: int) -> Tensor:
    """Return how often two members predict different classes, over all pairs; predictions (M, N). 0 for one member."""
    num_members = len(predictions)
    if num_members == 1:
        return torch.zeros((), dtype=torch.float64, device=predictions.device)
    votes = torch.stack([(predictions == label).sum(dim=0) for label in range(num_classes)]).double()
    agreeing_pairs = (votes * (votes - 1)).sum(dim=0)
    return 1 - (agreeing_pairs / (num_members * (num_members - 1))).mean()


def mutual_information(member_probabilities: Tensor) -> Tensor:
    """Return the entropy of the mean probabilities minus the mean entropy (N,): uncertainty due to disagreement."""
    return _entropy(member_probabilities.mean(dim=0)) - _entropy(member_probabilities).mean(dim=0)


def r2_score(predicted: Tensor, target: Tensor) -> Tensor:
    """Return R², averaged over outputs; for a constant target 1 if predictions are exact, else 0."""
    unexplained = (predicted - target).square().sum(dim=0)
    total = (target - target.mean(dim=0)).square().sum(dim=0)
    met_exactly = (unexplained == 0).to(total.dtype)
    return torch.where(total > 0, 1 - unexplained / total.clamp_min(torch.finfo(total.dtype).tiny), met_exactly).mean()


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(dim=-1)
