"""Scaling of a table's numbers: standardised, mapped to a normal distribution by their quantiles, or as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ensemblekit_datasets.table_files import Array

Scaling = Literal["standard", "quantile", "none"]
MOST_QUANTILES, LEAST_QUANTILES, ROWS_PER_QUANTILE = 1000, 10, 30
"""The number of quantiles grows with the rows, as in Gorishniy et al. 2021, Revisiting Deep Learning Models for Tabular
Data."""
_EDGE = 1e-7
"""Probabilities are kept so far from 0 and 1, as in scikit-learn: scaled values are between -5.2 and 5.2."""


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
class QuantileNumber:
    """A column of numbers that the quantiles of the training rows map to a normal distribution; increasing everywhere.

    Values beyond the training rows are as large as the largest, or as small as the smallest. A missing value is the
    median.
    """

    name: str
    quantiles: tuple[float, ...]
    """Those of equally spaced probabilities from 0 to 1, ascending, at least two."""

    @property
    def fill(self) -> float:
        """What a missing value stands for: the median."""
        return float(np.median(self.quantiles))

    @classmethod
    def fit(cls, name: str, values: Array) -> QuantileNumber:
        """Compute the quantiles of the values (N,) that are not missing."""
        present = values[~np.isnan(values)]
        count = max(min(len(present) // ROWS_PER_QUANTILE, MOST_QUANTILES), LEAST_QUANTILES)
        count = max(2, min(count, len(present)))
        quantiles = np.quantile(present, np.linspace(0, 1, count))
        return cls(name, tuple(np.maximum.accumulate(quantiles).tolist()))  # rounding must not make them decrease

    def encode(self, values: Array) -> Array:
        """Map values (N,) to (N, 1), approximately normally distributed if they are like the training rows."""
        quantiles = np.array(self.quantiles)
        if quantiles[0] == quantiles[-1]:
            return np.zeros((len(values), 1), dtype=np.float32)
        probabilities = np.linspace(0, 1, len(quantiles))
        # the middle of the probabilities of a value that several quantiles have
        below = np.interp(values, quantiles, probabilities)
        above = -np.interp(-values, -quantiles[::-1], -probabilities[::-1])
        mixed = np.where(values <= quantiles[0], 0.0, np.where(values >= quantiles[-1], 1.0, (below + above) / 2))
        inside = torch.from_numpy(np.where(np.isnan(values), 0.5, mixed)).clamp(_EDGE, 1 - _EDGE)
        scaled: Array = torch.special.ndtri(inside).float().numpy()[:, None]
        return scaled

    def decode(self, encoded: Tensor) -> str:
        """Return the value of an encoded row (1,) as text, within the range of the training rows."""
        probability = float(torch.special.ndtr(encoded[0].double()))
        value = np.interp(probability, np.linspace(0, 1, len(self.quantiles)), self.quantiles)
        return f"{float(value):.6g}"

    @property
    def width(self) -> int:
        """Number of encoded features."""
        return 1

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "quantile", "quantiles": list(self.quantiles)}


def fit_numbers(columns: Mapping[str, Array], scaling: Scaling) -> list[Number | QuantileNumber]:
    """Fit columns of numbers, in float64; each has at least one value."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    if scaling == "quantile":
        return [QuantileNumber.fit(name, column) for name, column in columns.items()]
    if not columns:
        return []
    values = np.array(list(columns.values())).T
    imputer = SimpleImputer(strategy="mean").fit(values)
    fills = imputer.statistics_.tolist()
    if scaling == "none":
        return [Number(name, fill, 0.0, 1.0) for name, fill in zip(columns, fills, strict=True)]
    scaler = StandardScaler().fit(imputer.transform(values))
    fitted = zip(columns, fills, scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True)
    return [Number(*column) for column in fitted]


def number_from_json(saved: Mapping[str, Any]) -> Number | QuantileNumber:
    """Make a column of numbers from the result of its `to_json`."""
    if saved["kind"] == "quantile":
        quantiles = tuple(map(float, saved["quantiles"]))
        if len(quantiles) < 2 or any(high < low for low, high in pairwise(quantiles)):
            raise ValueError(f"quantiles of {saved['name']!r:.60}")
        return QuantileNumber(str(saved["name"]), quantiles)
    return Number(str(saved["name"]), *(float(saved[key]) for key in ("fill", "mean", "std")))
