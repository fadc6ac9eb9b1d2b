"""Metrics of an ensemble: pure functions of the members' outputs (M, N, C)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.decomposition import decompose
from ensemblekit.core.losses import Loss

ECE_BINS = 15


@torch.no_grad()
def evaluate(outputs: Tensor, target: Tensor, loss: Loss, combined: Tensor | None = None) -> dict[str, float]:
    """All metrics of member outputs (M, N, C); `combined` (N, C) is the ensemble's output, by default the mean."""
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
        metrics |= regression_metrics(outputs, combined, target)
    else:
        classes = target.flatten() > 0 if loss.takes == "margins" else target
        probabilities = loss.probabilities(combined.double())  # else a gap of 90 would be one of 87
        metrics |= classification_metrics(loss.probabilities(outputs), probabilities, classes.long())
    return {name: float(value) for name, value in metrics.items()}


def flat_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of the test data under the names of a run: `test_accuracy`, but `mean_member_accuracy`."""
    return {name if "member" in name or "oracle" in name else f"test_{name}": value for name, value in metrics.items()}


@torch.no_grad()
def member_metrics(outputs: Tensor, target: Tensor, loss: Loss) -> list[dict[str, Any]]:
    """Loss, and accuracy or squared error, of each member by itself, from (M, N, C)."""
    kept = ("loss", "accuracy", "mse")
    rows = []
    for index, own in enumerate(outputs):
        metrics = evaluate(own.unsqueeze(0), target, loss)
        rows.append({"index": index, **{name: metrics[name] for name in kept if name in metrics}})
    return rows


def classification_metrics(member_probabilities: Tensor, probabilities: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Accuracy, calibration and disagreement from (M, N, K), (N, K) and class indices (N,)."""
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


def regression_metrics(outputs: Tensor, combined: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Squared errors (mean over samples and outputs) and R² from (M, N, C), (N, C) and real targets (N,) or (N, C)."""
    outputs, combined = outputs.double(), combined.double()
    target = target.reshape(combined.shape).double()
    member_mse = (outputs - target).square().mean(dim=(1, 2))
    return {
        "mse": (combined - target).square().mean(),
        "r2": r2_score(combined, target),
        "mean_member_mse": member_mse.mean(),
        "best_member_mse": member_mse.min(),
        "worst_member_mse": member_mse.max(),
    }


def negative_log_likelihood(probabilities: Tensor, classes: Tensor) -> Tensor:
    """The mean of -log p of the true class."""
    own = probabilities.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    return -own.clamp_min(torch.finfo(own.dtype).tiny).log().mean()


def brier_score(probabilities: Tensor, classes: Tensor) -> Tensor:
    """The mean squared distance between the probabilities and the one-hot truth, summed over classes (0 to 2)."""
    truth = torch.nn.functional.one_hot(classes, probabilities.shape[-1])
    return (probabilities - truth).square().sum(dim=-1).mean()


def calibration_error(probabilities: Tensor, classes: Tensor, bins: int = ECE_BINS) -> Tensor:
    """The expected calibration error: |accuracy - confidence| in equally wide bins of confidence, weighted by size."""
    confidence, predicted = probabilities.max(dim=-1)
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1  # bins are open on the left: (a, b]
    gap = (predicted == classes).to(confidence.dtype) - confidence
    sums = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device).index_add(0, bin_of, gap)
    return sums.abs().sum() / len(classes)


def disagreement(predictions: Tensor, num_classes: int) -> Tensor:
    """How often two members predict different classes, over all pairs; predictions (M, N). 0 for a single member."""
    num_members = len(predictions)
    if num_members == 1:
        return torch.zeros((), dtype=torch.float64, device=predictions.device)
    votes = torch.stack([(predictions == label).sum(dim=0) for label in range(num_classes)]).double()
    agreeing_pairs = (votes * (votes - 1)).sum(dim=0)
    return 1 - (agreeing_pairs / (num_members * (num_members - 1))).mean()


def mutual_information(member_probabilities: Tensor) -> Tensor:
    """Entropy of the members' mean probabilities less their mean entropy (N,): doubt that comes from disagreement."""
    return _entropy(member_probabilities.mean(dim=0)) - _entropy(member_probabilities).mean(dim=0)


def r2_score(predicted: Tensor, target: Tensor) -> Tensor:
    """The coefficient of determination, averaged over outputs; a constant target scores 1 if met exactly, else 0."""
    unexplained = (predicted - target).square().sum(dim=0)
    total = (target - target.mean(dim=0)).square().sum(dim=0)
    met_exactly = (unexplained == 0).to(total.dtype)
    return torch.where(total > 0, 1 - unexplained / total.clamp_min(torch.finfo(total.dtype).tiny), met_exactly).mean()


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(dim=-1)
