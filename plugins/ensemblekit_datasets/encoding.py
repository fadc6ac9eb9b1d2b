"""Encoding of a table's columns as features: plain numbers and categories, fitted on the training rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemblekit import DataError
from ensemblekit_datasets.columns import Columns
from ensemblekit_datasets.table_files import Array

MISSING_CATEGORY, UNKNOWN_CATEGORY = "(missing)", "(not in the training rows)"


@dataclass(frozen=True)
class Number:
    """A column of numbers: (value - mean) / std, with `fill` for missing values; all in float64."""

    name: str
    fill: float
    mean: float
    std: float

    def encode(self, values: Array) -> Array:
        """Standardise values (N,) to (N, 1)."""
        filled = np.where(np.isnan(values), self.fill, values)
        with np.errstate(over="ignore"):  # infinite inputs are refused by name
            return ((filled - self.mean) / self.std).astype(np.float32)[:, None]

    def decode(self, encoded: Tensor) -> str:
        """Return the value of an encoded row (1,) as text; a missing one is what it was filled with."""
        return f"{float(encoded[0]) * self.std + self.mean:.6g}"

    @property
    def width(self) -> int:
        """Number of encoded features."""
        return 1

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "number", "fill": self.fill, "mean": self.mean, "std": self.std}


@dataclass(frozen=True)
class Category:
    """A column of categories, one-hot encoded; one that the training rows do not have is encoded as zeros."""

    name: str
    categories: tuple[str, ...]

    @classmethod
    def fit(cls, name: str, values: Array) -> Category:
        """Collect the categories of the training rows, sorted; a missing value is one of them."""
        return cls(name, tuple(sorted({value or MISSING_CATEGORY for value in values})))

    def encode(self, values: Array) -> Array:
        """One-hot encode values (N,) to (N, K)."""
        position = {category: index for index, category in enumerate(self.categories)}
        found = [(row, position.get(value or MISSING_CATEGORY)) for row, value in enumerate(values)]
        known = [(row, index) for row, index in found if index is not None]
        encoded = np.zeros((len(values), len(self.categories)), dtype=np.float32)
        if known:
            encoded[tuple(np.array(known).T)] = 1
        return encoded

    def decode(self, encoded: Tensor) -> str:
        """Return the category of an encoded row (K,)."""
        return self.categories[int(encoded.argmax())] if bool(encoded.any()) else UNKNOWN_CATEGORY

    @property
    def width(self) -> int:
        """Number of encoded features, K."""
        return len(self.categories)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "category", "categories": list(self.categories)}


@dataclass(frozen=True)
class Encoder:
    """Turns columns into features (N, F): standardised numbers first, then one-hot categories."""

    features: tuple[Number | Category, ...]
    """In the order of the training file."""

    @classmethod
    def fit(cls, columns: Columns, rows: Tensor, names: Iterable[str], ignored: Iterable[str] = ()) -> Encoder:
        """Fit means, standard deviations and categories of the named columns on some rows.

        Args:
            columns: The columns of the training file.
            rows: Indices of the training rows.
            names: The columns that are features.
            ignored: Columns that the spec ignores already, for the error message.

        Raises:
            DataError: A numeric column has no value in these rows.
        """
        values = {name: columns.by_name[name][rows.numpy()] for name in names}
        numbers = {name: column for name, column in values.items() if column.dtype.kind == "f"}
        for name, column in numbers.items():
            if np.isnan(column).all():
                what = "expected at least one number in the training rows, got none"
                fix = f"remove the column, or set {ignore_setting(ignored, [name])}"
                raise DataError(what, f'{columns.path}, column "{name}"', fix)
        fitted = {number.name: number for number in _fit_numbers(numbers)}
        return cls(tuple(fitted.get(name) or Category.fit(name, column) for name, column in values.items()))

    @property
    def num_features(self) -> int:
        """Width of the encoded features, F."""
        return sum(feature.width for feature in self.features)

    @property
    def encoded_order(self) -> list[Number | Category]:
        """The features in the order in which they are encoded."""
        return sorted(self.features, key=lambda feature: isinstance(feature, Category))

    def __call__(self, columns: Columns, rows: Tensor | None = None) -> Tensor:
        """Encode some rows, or all, float32 (N, num_features); a `DataError` names a number that is too large."""
        index = np.arange(len(columns)) if rows is None else rows.numpy()
        parts = []
        for feature in self.encoded_order:
            values = columns.by_name[feature.name][index]
            parts.append(feature.encode(values))
            infinite = np.flatnonzero(~np.isfinite(parts[-1]).all(axis=1))
            if len(infinite):
                what = f"the number is too large for this column: {values[infinite[0]]}"
                raise DataError(what, columns.where(int(index[infinite[0]]), feature.name), "correct it")
        return torch.from_numpy(np.hstack(parts))

    def decode(self, inputs: Tensor) -> list[dict[str, str]]:
        """Return the values of encoded rows (N, F) as texts by column, in the order of the training file."""
        parts = inputs.split([feature.width for feature in self.encoded_order], dim=1)
        encoded = {feature.name: part for feature, part in zip(self.encoded_order, parts, strict=True)}
        return [
            {feature.name: feature.decode(encoded[feature.name][row]) for feature in self.features}
            for row in range(len(inputs))
        ]


def ignore_setting(ignored: Iterable[str], more: Iterable[str]) -> str:
    """Write the setting that ignores more columns than are ignored already."""
    names = ", ".join(f'"{name}"' for name in (*ignored, *more))
    return f"data.ignore = [{names}]"


def _fit_numbers(columns: Mapping[str, Array]) -> list[Number]:
    """Fit columns of numbers, in float64."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    if not columns:
        return []
    values = np.array(list(columns.values())).T
    imputer = SimpleImputer(strategy="mean").fit(values)
    scaler = StandardScaler().fit(imputer.transform(values))
    fitted = zip(columns, imputer.statistics_.tolist(), scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True)
    return [Number(*column) for column in fitted]


def feature_from_json(saved: Mapping[str, Any]) -> Number | Category:
    """Make a feature from the result of its `to_json`."""
    if saved["kind"] == "category":
        return Category(str(saved["name"]), tuple(map(str, saved["categories"])))
    return Number(str(saved["name"]), *(float(saved[key]) for key in ("fill", "mean", "std")))
