"""The training rows of an estimator: how much each counts, and the data set of a run that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

from ensemblekit.core.dataset import Splits
from ensemblekit.data.in_memory import InMemoryData

Floats = NDArray[np.float64]


class WeightedRows(InMemoryData):
    """In-memory data whose training samples have weights; there is no test data, and the training rows stand for it."""

    _weights: Tensor | None = PrivateAttr(None)

    def of_rows(self, inputs: NDArray[Any], targets: NDArray[Any], weights: Floats | None) -> Self:
        """Set the data; weights (N,) are at least 0."""
        part = (torch.from_numpy(np.array(inputs)), torch.from_numpy(np.array(targets)))
        self._weights = None if weights is None else torch.from_numpy(weights)
        return self.of(part, part)

    def load(self, seed: int) -> Splits:
        return replace(super().load(seed), weights=self._weights)


def check_weights(weights: Any, inputs: Any) -> Floats | None:
    """Return sample weights (N,); a `ValueError` unless there is one of at least 0 for each row, and one above 0."""
    if weights is None:
        return None
    checked: Floats = _check_sample_weight(weights, inputs, dtype=np.float64)
    if (checked < 0).any():
        raise ValueError("Negative values in sample_weight: weights are at least 0")
    if not checked.any():
        raise ValueError("Sample weights must contain at least one non-zero number: all are zero")
    return checked


def class_weights(weights: str | Mapping[Any, float] | None, classes: NDArray[Any]) -> str | list[float] | None:
    """Return the weights of classes as a spec has them: "balanced", or a list in the order of the classes."""
    if weights is None or weights == "balanced":
        return "balanced" if weights is not None else None
    if not isinstance(weights, Mapping):
        raise ValueError(f'class_weight must be "balanced", a dictionary or None, got {weights!r}')
    labels = classes.tolist()
    if unknown := [label for label in weights if label not in labels]:
        raise ValueError(f"class_weight has {unknown[0]!r}, which is not a class: {labels}")
    return [float(weights.get(label, 1.0)) for label in labels]


def distinct_rows(
    codes: Floats, targets: NDArray[Any], weights: Floats | None
) -> tuple[NDArray[np.intp], Floats] | None:
    """Merge equal rows: return the index of one row of each kind, in a fixed order, and the sums of weights.

    A weight of 2 then gives results that are bit-identical to those of a row that is there twice. That is for rows that
    are all in one batch; of several batches, a row that is there twice takes part in twice as many steps.

    Args:
        codes: the rows as numbers (N, F).
        targets: their targets (N,) or (N, C).
        weights: their weights (N,).

    Returns:
        None if there is nothing to merge: all rows differ and have the same weight, or all are equal.
    """
    rows = np.column_stack([codes, targets])
    _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    if len(first) == 1 or (weights is None and len(first) == len(rows)):
        return None
    return first, np.bincount(group.reshape(-1), weights, len(first)).astype(np.float64)
