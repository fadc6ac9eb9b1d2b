"""Confusion of classes: how often each class was predicted for each true class, and what that says of a class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def confusion_matrix(predicted: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Count samples by true class (row) and predicted class (column), int64 (K, K), from class indices (N,)."""
    counts = (classes * num_classes + predicted).bincount(minlength=num_classes**2)
    return counts.view(num_classes, num_classes)


def class_report(confusion: Tensor, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Describe each class: its name, count, recall, precision and the class that it is most often taken for.

    Args:
        confusion: counts (K, K) as of `confusion_matrix`.
        names: names of the classes. Default: their indices.

    Returns:
        A record for each class. `recall` is None if the class has no sample, `precision` if it was never predicted,
        and `confused_with` if no sample of the class was predicted as another one.
    """
    labels: Sequence[str | int] = range(len(confusion)) if names is None else names
    counts, predictions = confusion.sum(dim=1).tolist(), confusion.sum(dim=0).tolist()
    correct = confusion.diagonal().tolist()
    wrong = confusion - torch.diag(confusion.diagonal())
    most, where = (values.tolist() for values in wrong.max(dim=1))
    return [
        {
            "class": label,
            "count": counts[index],
            "recall": correct[index] / counts[index] if counts[index] else None,
            "precision": correct[index] / predictions[index] if predictions[index] else None,
            "confused_with": labels[where[index]] if most[index] else None,
            "confused": most[index],
        }
        for index, label in enumerate(labels)
    ]


def label_report(predicted: Tensor, labels: Tensor, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Describe each label like `class_report`, from labels (N, C) of bool that exclude nothing: none is confused."""
    both, counts, predictions = (part.sum(dim=0).tolist() for part in (predicted & labels, labels, predicted))
    return [
        {
            "class": name,
            "count": counts[index],
            "recall": both[index] / counts[index] if counts[index] else None,
            "precision": both[index] / predictions[index] if predictions[index] else None,
            "confused_with": None,
            "confused": 0,
        }
        for index, name in enumerate(range(labels.shape[1]) if names is None else names)
    ]
