"""Metrics of multi-label predictions: pure functions of probabilities (N, C) and labels (N, C) of 0 and 1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ensemblekit.core.losses import Loss

THRESHOLD = 0.5
"""A label is predicted from this probability on."""


def predicted_labels(probabilities: Tensor) -> Tensor:
    """Return which labels are predicted, bool (..., C)."""
    return probabilities >= THRESHOLD


def binary_entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy (...) of independent labels (..., C), in nats, summed over the labels."""
    return (torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)).sum(dim=-1)


def multilabel_metrics(outputs: Tensor, combined: Tensor, labels: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Compute accuracy, F1, ranking, calibration and uncertainty from (M, N, C), (N, C) and labels (N, C)."""
    combined, truth = combined.double(), labels.bool()
    probabilities = loss.probabilities(combined)
    predicted = predicted_labels(probabilities)
    members = torch.stack([predicted_labels(loss.probabilities(member.double())) for member in outputs])
    correct = (members == truth).all(dim=-1)
    member_accuracy = correct.double().mean(dim=1)
    mean = torch.zeros_like(probabilities)
    aleatoric = mean.new_zeros(len(mean))
    for member in outputs:  # one at a time, to need little memory
        own = loss.probabilities(member.double())
        mean, aleatoric = mean + own / len(outputs), aleatoric + binary_entropy(own) / len(outputs)
    return {
        "accuracy": (predicted == truth).all(dim=-1).double().mean(),
        "label_accuracy": (predicted == truth).double().mean(),
        "micro_f1": micro_f1(predicted, truth),
        "macro_f1": macro_f1(predicted, truth),
        "average_precision": mean_average_precision(probabilities, truth),
        "nll": label_nll(combined, truth).mean(),
        "ece": label_calibration_error(probabilities, truth),
        "brier": (probabilities - truth.double()).square().sum(dim=-1).mean(),
        "mean_member_accuracy": member_accuracy.mean(),
        "best_member_accuracy": member_accuracy.max(),
        "worst_member_accuracy": member_accuracy.min(),
        "oracle_accuracy": correct.any(dim=0).double().mean(),
        "disagreement": label_disagreement(members).mean(),
        "prediction_entropy": binary_entropy(probabilities).mean(),
        "entropy": binary_entropy(mean).mean(),
        "aleatoric_entropy": aleatoric.mean(),
        "mutual_information": (binary_entropy(mean) - aleatoric).clamp_min(0).mean(),
    }


def label_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood (N,) of the labels, summed over them, from the logits (N, C)."""
    return -torch.where(labels.bool(), logsigmoid(logits), logsigmoid(-logits)).sum(dim=-1)


def micro_f1(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return the F1 score over all labels of all samples; 0 if there are none and none are predicted."""
    counted = predicted.sum() + labels.sum()
    return 2 * (predicted & labels).sum().double() / counted.clamp_min(1)


def macro_f1(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over labels of their F1 scores; that of a label neither present nor predicted is 0."""
    counted = predicted.sum(dim=0) + labels.sum(dim=0)
    return (2 * (predicted & labels).sum(dim=0).double() / counted.clamp_min(1)).mean()


def mean_average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the average precision over the labels that at least one sample has; 0 if there is none.

    As scikit-learn defines it: Σ (R_n - R_n-1) P_n over the different scores, without interpolation.
    """
    values = [average_precision(scores[:, c], labels[:, c]) for c in range(labels.shape[1]) if bool(labels[:, c].any())]
    return torch.stack(values).mean() if values else scores.new_zeros(())


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of one label from scores (N,) and whether samples have it (N,)."""
    order = scores.argsort(descending=True, stable=True)
    ranked, found = scores[order], labels[order].double().cumsum(0)
    # samples with equal scores are one threshold: only the last of them counts
    last = torch.cat([ranked[1:] != ranked[:-1], torch.ones(1, dtype=torch.bool, device=scores.device)])
    precision = (found / torch.arange(1, len(found) + 1, device=scores.device))[last]
    recall = found[last] / found[-1]
    return (recall.diff(prepend=recall.new_zeros(1)) * precision).sum()


def label_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the mean over labels of |frequency - probability| in bins of equal width, weighted by their size."""
    bin_of = (probabilities * bins).ceil().long().clamp(1, bins) - 1
    sums = torch.zeros(bins, probabilities.shape[1], dtype=probabilities.dtype, device=probabilities.device)
    sums.scatter_add_(0, bin_of, labels.to(probabilities.dtype) - probabilities)
    return (sums.abs().sum(dim=0) / len(labels)).mean()


def label_disagreement(members: Tensor) -> Tensor:
    """Return the share of labels (N,) that two members predict differently, over all pairs, from (M, N, C) of bool."""
    num_members = len(members)
    if num_members == 1:
        return torch.zeros(members.shape[1], dtype=torch.float64, device=members.device)
    votes = members.sum(dim=0).double()
    different = 2 * votes * (num_members - votes) / (num_members * (num_members - 1))
    return different.mean(dim=-1)
