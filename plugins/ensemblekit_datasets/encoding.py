"""Encoding of a table's columns as features: plain numbers and categories, fitted on the training rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemblekit import DataError
from ensemblekit_datasets.columns import Columns
from ensemblekit_datasets.number_scaling import Number, QuantileNumber, Scaling, fit_numbers, number_from_json
from ensemblekit_datasets.table_files import Array

MISSING_CATEGORY, UNKNOWN_CATEGORY = "(missing)", "(not in the training rows)"


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
        for category, index in list(position.items()):
            position.setdefault(_other_notation(category), index)
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


def _other_notation(category: str) -> str:
    """Write an integer as "1" or as "1.0": frames have integers as floating-point numbers where some are missing."""
    if category.endswith(".0"):
        return category.removesuffix(".0")
    return f"{category}.0" if category.removeprefix("-").isdecimal() else category


Feature = Number | QuantileNumber | Category


@dataclass(frozen=True)
class Encoder:
    """Turns columns into features (N, F): scaled numbers first, then one-hot categories."""

    features: tuple[Feature, ...]
    """In the order of the training file."""

    @classmethod
    def fit(
        cls,
        columns: Columns,
        rows: Tensor,
        names: Iterable[str],
        ignored: Iterable[str] = (),
        scaling: Scaling = "standard",
    ) -> Encoder:
        """Fit the scaling of numbers and the categories of the named columns on some rows.

        Args:
            columns: The columns of the training file.
            rows: Indices of the training rows.
            names: The columns that are features.
            ignored: Columns that the spec ignores already, for the error message.
            scaling: How numbers are scaled.

        Raises:
            DataError: A numeric column has no value in these rows.
        """
        values = {name: columns.by_name[name][rows.numpy()] for name in names}
        numbers = {name: column for name, column in values.items() if column.dtype.kind == "f"}
        for name, column in numbers.items():
            if np.isnan(column).all():
                what = "expected at least one number in the training rows, got none"
                fix = f"remove the column, or set {ignore_setting(ignored, [name])}"
                raise DataError(what, f'{columns.source}, column "{name}"', fix)
        fitted = {number.name: number for number in fit_numbers(numbers, scaling)}
        return cls(tuple(fitted.get(name) or Category.fit(name, column) for name, column in values.items()))

    @property
    def num_features(self) -> int:
        """Width of the encoded features, F."""
        return sum(feature.width for feature in self.features)

    @property
    def encoded_order(self) -> list[Feature]:
        """The features in the order in which they are encoded."""
        return sorted(self.features, key=lambda feature: isinstance(feature, Category))

    @property
    def category_blocks(self) -> tuple[tuple[int, int], ...]:
        """The first encoded feature and the number of them of each column of categories."""
        ends = accumulate(feature.width for feature in self.encoded_order)
        return tuple(
            (end - feature.width, feature.width)
            for feature, end in zip(self.encoded_order, ends, strict=True)
            if isinstance(feature, Category)
        )

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


def feature_from_json(saved: Mapping[str, Any]) -> Feature:
    """Make a feature from the result of its `to_json`."""
    if saved["kind"] == "category":
        return Category(str(saved["name"]), tuple(map(str, saved["categories"])))
    return number_from_json(saved)
