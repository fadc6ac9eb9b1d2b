"""Arrays of any kind as tensors: torch, numpy, pandas and other frames, lists of numbers.

Libraries other than numpy and torch are recognised by what their objects can do, so that none of them is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ensemblekit.core.errors import DataError

_NUMBERS = "biuf"
"""Kinds of numpy's dtypes that are real numbers: bool, int, unsigned int and float."""


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor, an array, a frame or a column of a frame, or a list of numbers."""
    if isinstance(value, list):
        return bool(value) and isinstance(_first_leaf(value), bool | int | float | np.generic)
    if isinstance(value, Tensor):
        return value.dim() > 0
    return hasattr(value, "__array__") and bool(getattr(value, "shape", ()))


def is_frame(value: Any) -> bool:
    """Return whether a value is a table with named columns, such as a frame of pandas or polars."""
    # pyarrow's tables call their arrays columns, not the names of these
    return hasattr(value, "__array__") and hasattr(value, "columns") and not hasattr(value, "column_names")


def frames_of(data: Any) -> list[Any] | None:
    """Return the frames of data passed in Python: one, or two or three in a tuple; None if it is anything else.

    Raises:
        DataError: A frame is lazy: its rows are not there yet.
    """
    parts = list(data) if isinstance(data, tuple | list) and len(data) in (2, 3) else [data]
    if any(hasattr(type(part), "collect") and hasattr(type(part), "columns") for part in parts):
        raise DataError("expected frames with rows, got a lazy one", "data", "collect it: data=frame.collect()")
    return parts if all(map(is_frame, parts)) else None


def as_features(value: Any, where: str) -> Tensor:
    """Convert inputs to a tensor on the device that they are on: uint8 as it is, everything else as floating point.

    The columns of a frame are always floating point.

    Raises:
        DataError: the values are not numbers.
    """
    if isinstance(value, Tensor):
        return value
    if is_frame(value):
        return torch.from_numpy(_frame_values(value, where))
    array = _numbers(value, where)
    if array.dtype == np.uint8:
        return _tensor(array)
    return _tensor(array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))


def as_labels(value: Any, where: str) -> Tensor | list[str]:
    """Convert targets to class indices, int64 (N,), to real values, or to the names of classes.

    Raises:
        DataError: the values are neither numbers nor texts, or a value is missing.
    """
    if isinstance(value, Tensor):
        return _flat(value.detach().cpu())
    if is_frame(value):
        names = list(value.columns)
        are_labels = len(names) > 1 and all(_kind(value[name]) == "b" for name in names)
        values = value[names[0]] if len(names) == 1 else _frame_values(value, where)
        value = values.astype(bool) if are_labels else values
    array = np.asarray(value)
    if array.dtype.kind in "OUT":
        return _texts(array, where)
    array = _numbers(array, where)
    return _flat(_tensor(array if array.dtype.kind == "f" else array.astype(np.int64)))


def _flat(targets: Tensor) -> Tensor:
    """Return class indices (N, 1) as (N,)."""
    is_column = targets.dim() == 2 and targets.shape[1] == 1 and not targets.is_floating_point()
    return targets.squeeze(1) if is_column else targets


def _frame_values(frame: Any, where: str) -> NDArray[np.float32]:
    """The columns of a frame as float32 (N, F); missing values are nan."""
    bad = [str(name) for name in frame.columns if _kind(frame[name]) not in _NUMBERS]
    if bad:
        shown = ", ".join(f'"{name}"' for name in bad[:5]) + (" …" if len(bad) > 5 else "")
        fix = 'encode them as numbers, or pass the frame with its target, data=frame: the data set "table" encodes it'
        raise DataError(f"expected columns of numbers, got other values in {shown}", where, fix)
    columns = [_column_values(frame[name]) for name in frame.columns]
    return np.stack(columns, axis=1).astype(np.float32) if columns else np.empty((len(frame), 0), np.float32)


def _kind(column: Any) -> str:
    kind = getattr(column.dtype, "kind", None)  # also of pandas' own dtypes for numbers with missing values
    return str(kind) if kind is not None else np.asarray(column).dtype.kind


def _column_values(column: Any) -> NDArray[Any]:
    array = np.asarray(column)
    if array.dtype.kind != "O":
        return array
    return np.array([float("nan") if value is None or value != value else float(value) for value in _plain(array)])


def _plain(array: NDArray[Any]) -> list[Any]:
    """The values of an array of objects, with None for pandas' mark of a missing value."""
    return [None if type(value).__name__ == "NAType" else value for value in array.tolist()]


def _texts(array: NDArray[Any], where: str) -> Tensor | list[str]:
    """Names of classes; objects that are numbers after all become a tensor."""
    values = _plain(array.reshape(-1) if array.shape[1:] == (1,) else array)
    missing = next((index for index, value in enumerate(values) if value is None or value != value), None)
    if missing is not None:
        raise DataError("the target is missing", f"{where} sample {missing}", "remove the sample")
    if all(isinstance(value, str) for value in values):
        return values
    return as_labels(_numbers(array, where), where)


def _numbers(value: Any, where: str) -> NDArray[Any]:
    """An array of real numbers in the machine's byte order."""
    array: NDArray[Any]
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            integers = all(isinstance(number, int | np.integer) for number in array.flat)
            array = array.astype(np.int64 if integers else np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        what = f"expected numbers, got {_description(value)}"
        raise DataError(what, where, f"give an array of one number type ({error})") from error
    if array.dtype.kind not in _NUMBERS:
        raise DataError(f"expected numbers, got values of type {array.dtype}", where, "convert them to numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _tensor(array: NDArray[Any]) -> Tensor:
    """A tensor that shares the memory of an array where torch can."""
    if array.dtype.kind == "f" and array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    contiguous = np.ascontiguousarray(array)
    return torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())


def _first_leaf(value: Any) -> Any:
    while isinstance(value, Sequence) and not isinstance(value, str) and len(value):
        value = value[0]
    return value


def _description(value: Any) -> str:
    return f"a {type(value).__name__}"
