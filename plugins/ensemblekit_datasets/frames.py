"""Frames of pandas, polars and the like as raw tables; recognised by what they can do, so that none is imported."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np

from ensemblekit import DataError
from ensemblekit_datasets.table_files import Array, Declared, RawTable, check_distinct

_NUMBERS = (bool, int, float, decimal.Decimal, np.number, np.bool_)
_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)
_REFUSED = (list, tuple, set, dict, bytes, np.ndarray, complex, np.complexfloating)
_MISSING = ("NAType", "NaTType")
"""The names of the types of pandas' marks of missing values."""


def raw_frame(frame: Any, source: str) -> RawTable:
    """Return the columns of a frame by name, without its index.

    Args:
        frame: A frame: it has `columns`, and `frame[name]` is a column with a `dtype` that numpy can convert.
        source: What error messages call it.

    Raises:
        DataError: It has no rows, or columns that share a name.
    """
    names = {str(name): name for name in frame.columns}
    check_distinct([str(name) for name in frame.columns], source)
    if not len(frame):
        raise DataError("expected at least one row, got none", source, "use a frame with rows")
    by_name: dict[str, Array] = {}
    declared: dict[str, Declared] = {}
    refused: dict[str, str] = {}
    for name, own in names.items():
        by_name[name], kind = _column(frame[own])
        if kind in ("number", "text", "date"):
            declared[name] = kind
        elif kind:
            refused[name] = kind
    return RawTable(source, by_name, "row", range(len(frame)), declared, refused)


def _column(column: Any) -> tuple[Array, Any]:
    """Return the values of a column, and "number", "text", "date", "" if its values are mixed, else its own type."""
    own_type = str(column.dtype).lower()
    array = np.asarray(column)
    if own_type.startswith(("category", "dictionary")):  # also of numbers
        return _objects([None if value is None else str(value) for value in _values(column)]), "text"
    # integers with missing values are kept as integers: as categories they are "1", not "1.0"
    if array.ndim == 1 and array.dtype.kind in "biuf" and not _is_changed(array, own_type):
        return array, "number"
    values = _values(column)
    present = [value for value in values if value is not None]
    if array.dtype.kind in "mM" or _all(present, _DATES) or own_type.startswith("period"):
        return _objects([None if value is None else str(value) for value in values]), "date"
    if _all(present, _NUMBERS):
        return _objects(values), "number"
    nested = next((value for value in present if isinstance(value, _REFUSED)), None)
    if array.ndim != 1 or nested is not None:
        return _objects([]), own_type if nested is None else f"{own_type} ({type(nested).__name__})"
    texts = [value if value is None or isinstance(value, _NUMBERS) else str(value) for value in values]
    return _objects(texts), "" if any(isinstance(value, _NUMBERS) for value in present) or not present else "text"


def _is_changed(array: Array, own_type: str) -> bool:
    """Whether numpy has integers as floating-point numbers, because some are missing."""
    return array.dtype.kind == "f" and own_type.startswith(("int", "uint"))


def _values(column: Any) -> list[Any]:
    """The values as Python objects, with None for missing ones."""
    return [None if _is_missing(value) else value for value in column.to_list()]


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or type(value).__name__ in _MISSING
        or (isinstance(value, float | np.floating) and np.isnan(value))
    )


def _all(values: list[Any], types: tuple[type, ...]) -> bool:
    return bool(values) and all(isinstance(value, types) for value in values)


def _objects(values: list[Any]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
