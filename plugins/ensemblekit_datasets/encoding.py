"""Encoding of a table's columns as features, fitted on the training rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor

from ensemblekit import DataError
from ensemblekit_datasets.columns import Array, Columns

MISSING_CATEGORY = "(missing)"


@dataclass(frozen=True)
class Encoder:
    """Turns columns into features (N, F): standardised numbers first, then one-hot categories."""

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    scaler: Any
    one_hot: Any
    num_features: int

    @classmethod
    def fit(cls, columns: Columns, rows: Tensor, features: Iterable[str]) -> Encoder:
        """Fit means, standard deviations and categories on some rows.

        Raises:
            DataError: A numeric column has no value in these rows.
        """
        is_numeric = {name: columns.by_name[name].dtype.kind == "f" for name in features}
        numeric = tuple(name for name, number in is_numeric.items() if number)
        categorical = tuple(name for name, number in is_numeric.items() if not number)
        numbers, categories = _numbers(columns, rows, numeric), _categories(columns, rows, categorical)
        for name, column in zip(numeric, numbers.T, strict=True):
            if np.isnan(column).all():
                what = "expected at least one number in the training rows, got none"
                raise DataError(what, f'{columns.path}, column "{name}"', "remove the column")
        scaler = make_pipeline(SimpleImputer(strategy="mean"), StandardScaler()).fit(numbers) if numeric else None
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(categories) if categorical else None
        width = len(numeric) + sum(map(len, one_hot.categories_ if one_hot else ()))
        return cls(numeric, categorical, scaler, one_hot, width)

    def __call__(self, columns: Columns, rows: Tensor) -> Tensor:
        """Encode some rows, float32 (N, num_features)."""
        parts = []
        if self.scaler is not None:
            parts.append(self.scaler.transform(_numbers(columns, rows, self.numeric)))
        if self.one_hot is not None:
            parts.append(self.one_hot.transform(_categories(columns, rows, self.categorical)))
        return torch.from_numpy(np.hstack(parts)).float()


def _numbers(columns: Columns, rows: Tensor, names: tuple[str, ...]) -> Array:
    return np.array([columns.by_name[name][rows.numpy()] for name in names]).reshape(len(names), len(rows)).T


def _categories(columns: Columns, rows: Tensor, names: tuple[str, ...]) -> Array:
    values = [[value or MISSING_CATEGORY for value in columns.by_name[name][rows.numpy()]] for name in names]
    return np.array(values, dtype=object).reshape(len(names), len(rows)).T
