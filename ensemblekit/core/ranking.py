"""How well scores separate positive from negative samples: AUROC, average precision, false positives at a recall."""

from __future__ import annotations

import torch
from torch import Tensor


def auroc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the area under the ROC curve: how often a positive sample scores higher than a negative one.

    Args:
        scores: (N,), higher for samples that are more likely positive. Equal scores count as half.
        positive: whether each sample is positive, bool (N,).

    Returns:
        A scalar in float64; nan unless there are positive and negative samples.
    """
    hits, false_alarms = _counts(scores, positive)
    recall, false_rate = _with_zero(hits / hits[-1]), _with_zero(false_alarms / false_alarms[-1])
    return torch.trapezoid(recall, false_rate)


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the mean of the precisions at each threshold, weighted by the increase of recall; arguments as `auroc`.

    This is the area under the precision-recall curve without interpolation, which would be too optimistic.
    """
    hits, false_alarms = _counts(scores, positive)
    recall = _with_zero(hits / hits[-1])
    return (recall.diff() * hits / (hits + false_alarms)).sum()


def false_positive_rate(scores: Tensor, positive: Tensor, recall: float = 0.95) -> Tensor:
    """Return the share of negative samples at or above the highest threshold that finds this share of the positive.

    Args:
        scores: as for `auroc`.
        positive: as for `auroc`.
        recall: the share of positive samples to find.
    """
    hits, false_alarms = _counts(scores, positive)
    first = int((hits >= recall * hits[-1]).nonzero()[0])
    return false_alarms[first] / false_alarms[-1]


def _counts(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Count the positive and the negative samples at or above each distinct score, from the highest score on."""
    ordered, order = scores.sort(descending=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    hits = positive[order].double().cumsum(0)
    total = torch.arange(1, len(hits) + 1, dtype=hits.dtype, device=hits.device)
    return hits[is_last], (total - hits)[is_last]


def _with_zero(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values])
