"""Arrays and frames become inputs of networks: missing values imputed, numbers scaled, categories one-hot encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer, StandardScaler
from sklearn.utils import assert_all_finite

Scaling = Literal["standard", "quantile"] | None
MAX_CATEGORIES = 1000
"""More categories than this in a column are likely to be identifiers."""
MAX_QUANTILES = 1000


@dataclass(frozen=True)
class Columns:
    """The columns of a table by their kind, as they were passed."""

    numbers: NDArray[np.float64]
    """(N, number of such columns); nan where a value is missing."""
    categories: NDArray[np.object_]
    """Texts (N, number of such columns); None where a value is missing."""

    def select(self, rows: NDArray[Any]) -> Self:
        """Return some of the rows."""
        return type(self)(self.numbers[rows], self.categories[rows])

    def codes(self) -> NDArray[np.float64]:
        """Return the numbers and, as the code of each, the categories; equal rows have equal codes."""
        codes = [np.unique(column.astype(str), return_inverse=True)[1].reshape(-1, 1) for column in self.categories.T]
        return np.concatenate([self.numbers, *codes], axis=1)


def is_frame(value: Any) -> bool:
    """Return whether a value is a table with named columns, such as a pandas or polars frame."""
    return hasattr(value, "columns") and hasattr(value, "__array__") and not callable(value.columns)


def read_array(array: NDArray[Any]) -> Columns:
    """Read an array of numbers (N, F)."""
    return Columns(array.astype(np.float64), np.empty((len(array), 0), dtype=object))


class InputPreparation:
    """The preparation of tables, fitted to the training rows.

    Args:
        scaling: "standard": numbers have mean 0 and standard deviation 1; "quantile": their ranks are normally
            distributed; None: they are used as they are.
        seed: of the quantiles, which are those of a sample if there are very many rows.
    """

    def __init__(self, scaling: Scaling, seed: int) -> None:
        if scaling not in ("standard", "quantile", None):
            raise ValueError(f'scaling must be "standard", "quantile" or None, got {scaling!r}')
        self.scaling, self.seed = scaling, seed
        self.columns: list[Any] | None = None
        """The names of the columns, if it was fitted to a frame."""
        self.number_columns: list[Any] = []
        self.category_columns: list[Any] = []

    def read_training_frame(self, frame: Any) -> Columns:
        """Read a frame and decide which columns are numbers and which are categories."""
        self.columns = names = list(frame.columns)
        if len(set(names)) < len(names):
            raise ValueError("several columns have the same name; rename them")
        kinds = {name: _kind(frame[name], name) for name in names}
        self.number_columns = [name for name in names if kinds[name] == "number"]
        self.category_columns = [name for name in names if kinds[name] == "category"]
        return self.read_frame(frame)

    def read_frame(self, frame: Any) -> Columns:
        """Read the columns of a frame that has those of the training frame."""
        numbers = np.empty((len(frame), len(self.number_columns)))
        for index, name in enumerate(self.number_columns):
            numbers[:, index] = _numbers(frame[name], name)
        categories = np.empty((len(frame), len(self.category_columns)), dtype=object)
        for index, name in enumerate(self.category_columns):
            categories[:, index] = [None if _is_missing(value) else str(value) for value in _values(frame[name])]
        return Columns(numbers, categories)

    def fit(self, columns: Columns, weights: NDArray[np.float64] | None) -> Self:
        """Fit the preparation to training rows, whose weights (N,) count for means and standard deviations."""
        self.number_steps: Pipeline | None = None
        self.encoder: OneHotEncoder | None = None
        if columns.numbers.shape[1]:
            imputer = SimpleImputer(keep_empty_features=True)
            self.number_steps = make_pipeline(imputer, *self._scaler(len(columns.numbers)))
            takes_weights = self.scaling == "standard" and weights is not None
            self.number_steps.fit(
                columns.numbers, **({"standardscaler__sample_weight": weights} if takes_weights else {})
            )
        if columns.categories.shape[1]:
            self.encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float32)
            self.encoder.fit(columns.categories)
            _check_categories(self.category_columns, self.encoder)
        return self

    def _scaler(self, num_rows: int) -> list[Any]:
        if self.scaling == "standard":
            return [StandardScaler()]
        quantiles = min(num_rows, MAX_QUANTILES)
        normal = {"output_distribution": "normal", "random_state": self.seed % 2**32}
        return [QuantileTransformer(n_quantiles=quantiles, **normal)] if self.scaling == "quantile" else []

    def __call__(self, columns: Columns) -> NDArray[np.float32]:
        """Return the inputs of networks (N, number of inputs)."""
        parts = []
        if self.number_steps is not None:
            parts.append(self.number_steps.transform(columns.numbers).astype(np.float32))
        if self.encoder is not None:
            parts.append(self.encoder.transform(columns.categories))
        return np.concatenate(parts, axis=1)


def _kind(column: Any, name: Any) -> Literal["number", "category"]:
    kind = getattr(column.dtype, "kind", None) or np.asarray(column).dtype.kind
    if kind in "mM" or (kind == "O" and hasattr(next(filter(_is_known, _values(column)), None), "isoformat")):
        raise ValueError(f'column "{name}" has dates; give numbers instead, such as the year and the day of the year')
    if kind in "biuf":
        return "number"
    known = [value for value in _values(column) if _is_known(value)]
    is_category = str(column.dtype) in ("category", "Categorical", "Enum")
    return "number" if known and not is_category and all(isinstance(value, Real) for value in known) else "category"


def _numbers(column: Any, name: Any) -> NDArray[np.float64]:
    """Return a column as numbers, with nan where a value is missing."""
    array = np.asarray(column)
    if array.dtype.kind not in "biuf":
        try:
            array = np.array([np.nan if _is_missing(value) else float(value) for value in array.tolist()])
        except (TypeError, ValueError) as error:
            raise ValueError(f'column "{name}" had only numbers in fit: {error}') from error
    numbers: NDArray[np.float64] = array.astype(np.float64)
    assert_all_finite(numbers, allow_nan=True, input_name=str(name))
    return numbers


def _values(column: Any) -> list[Any]:
    values: list[Any] = np.asarray(column, dtype=object).tolist()
    return values


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ == "NAType" or value != value


def _is_known(value: Any) -> bool:
    return not _is_missing(value)


def _check_categories(names: Sequence[Any], encoder: OneHotEncoder) -> None:
    for name, categories in zip(names, encoder.categories_, strict=True):
        if len(categories) > MAX_CATEGORIES:
            what = f'column "{name}" has {len(categories):,} categories, such as {categories[0]!r}'
            raise ValueError(f"{what}; leave it out, or join categories (at most {MAX_CATEGORIES:,} are encoded)")
