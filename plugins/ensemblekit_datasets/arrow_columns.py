"""Columns of Arrow tables as numbers and targets, with errors that name the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ensemblekit import DataError, did_you_mean
from ensemblekit_datasets.arrow_splits import StoredSplit

Array = npt.NDArray[np.float64]
Task = Literal["classification", "regression"]
TARGETS = ("label", "labels", "target")
"""Names of the target, if no column is marked as one."""
MANY_CLASSES = 1000
"""Integers with more values than this, or fewer than two samples for each, are classes only if the spec says so."""


def column_names(split: StoredSplit, kind: Literal["image", "number", "label"]) -> list[str]:
    """Return the columns that hold images, numbers or lists of numbers, or indices of named classes."""
    return [field.name for field in split.schema if _kind(split, field) == kind]


def check_column(split: StoredSplit, name: str, key: str) -> None:
    """Raise a `DataError` if a split does not have a column."""
    names = split.schema.names
    if names.count(name) != 1:
        what = f'no column "{name}" in split "{split.name}"' if name not in names else f'several columns "{name}"'
        near = f"{did_you_mean(name, names)} " if did_you_mean(name, names) else ""
        raise DataError(what, str(split.folder), f"{near}set data.{key} to one of: {', '.join(names)}")


def find_target(split: StoredSplit, named: str | None) -> str:
    """Return the target column: the one that was named, or the only one that can be meant."""
    if named is not None:
        return named
    labels = column_names(split, "label")
    usual = [name for name in TARGETS if name in split.schema.names]
    if len(labels) == 1 or (not labels and len(usual) == 1):
        return (labels or usual)[0]
    what = f"several columns may be the target: {', '.join(labels)}" if labels else "no column is marked as the target"
    raise DataError(what, str(split.folder), f"set data.target to one of: {', '.join(split.schema.names)}")


def find_features(split: StoredSplit, named: Sequence[str], target: str) -> list[str]:
    """Return the columns of the inputs: those that were named, else the only image column, else all numbers."""
    if named:
        return list(named)
    images = [name for name in column_names(split, "image") if name != target]
    if len(images) > 1:
        what = f"several columns hold images: {', '.join(images)}"
        raise DataError(what, str(split.folder), "set data.features to one of them")
    found = images or [name for name in column_names(split, "number") if name != target]
    if not found:
        what = f"no column besides the target holds images or numbers: {', '.join(split.schema.names)}"
        raise DataError(what, str(split.folder), "add such a column, for example with `map`")
    return found


def _kind(split: StoredSplit, field: Any) -> str:
    """Say what a column holds: an image, a label, a number (or a list of numbers), or something else."""
    from pyarrow import types

    noted = split.features.get(field.name)
    declared = noted.get("_type") if isinstance(noted, dict) else None
    if declared == "ClassLabel":
        return "label"
    if types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
        return "image" if declared in ("Image", None) else "other"
    if declared == "Image" or types.is_binary(field.type) or types.is_large_binary(field.type):
        return "image"
    inner = field.type.value_type if _is_list(field.type) else field.type
    is_number = types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)
    return "number" if is_number else "other"


def _is_list(data_type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type))


def read_numbers(split: StoredSplit, column: str) -> Array:
    """Read numbers, or lists of as many numbers each, float64 (N, K); nan is a missing value.

    Raises:
        DataError: The column holds something else, or the lists differ in length; the row is named.
    """
    field = split.schema.field(column)
    if _kind(split, field) != "number":
        what = f'column "{column}" holds {field.type}, not numbers'
        raise DataError(what, f'{split.folder}, split "{split.name}"', "choose a column of numbers")
    values = split.column(column)
    if not _is_list(field.type):
        return _as_array(values)[:, None]
    chunks = values.chunks
    lengths = np.concatenate([_as_array(chunk.value_lengths()) for chunk in chunks] or [np.zeros(0)])
    different = np.flatnonzero(lengths != lengths[:1])  # that of a missing list is nan
    if len(different):
        row = int(different[0])
        what = f'column "{column}" has lists of different lengths: {lengths[0]:g} in row 0, {lengths[row]:g} here'
        raise DataError(what, split.where(row), "give every row as many numbers")
    flat = np.concatenate([_as_array(chunk.flatten()) for chunk in chunks] or [np.zeros(0)])
    return flat.reshape(len(lengths), -1)


def _as_array(values: Any) -> Array:
    from pyarrow import float64

    # a copy: torch takes no arrays that cannot be written to, such as those of a mapped file
    return np.array(values.cast(float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


@dataclass(frozen=True)
class Targets:
    """What is predicted: the task, and the names of the classes."""

    task: Task
    classes: tuple[str, ...] | None

    @classmethod
    def of(cls, split: StoredSplit, column: str, task: Literal["auto", "classification", "regression"]) -> Targets:
        """Decide by the column of the training split; a `DataError` asks where both tasks make sense."""
        noted = split.features.get(column)
        if isinstance(noted, dict) and noted.get("_type") == "ClassLabel" and task != "regression":
            names = noted.get("names")
            if isinstance(names, list) and names:
                return cls("classification", tuple(map(str, names)))
        if task == "regression" or (task == "auto" and _is_real(split, column)):
            return cls("regression", None)
        values = _class_values(split, column)
        different = sorted(set(values))
        if task == "auto" and isinstance(values[0], int) and len(different) > min(MANY_CLASSES, len(values) // 2):
            what = f'the target "{column}" has {len(different)} different integers in {len(values):,} rows'
            fix = 'choose: data.task = "classification", or data.task = "regression"'
            raise DataError(what, str(split.folder), fix)
        if len(different) < 2:
            what = f'expected at least 2 classes in column "{column}", got {different}'
            raise DataError(what, str(split.folder), "set data.target to the column of classes")
        return cls("classification", tuple(map(str, different)))

    def read(self, split: StoredSplit, column: str) -> Tensor:
        """Read the targets of a split: class indices (N,), or real values (N, C)."""
        if self.classes is None:
            values = read_numbers(split, column)
            for row in np.flatnonzero(~np.isfinite(values).all(axis=1))[:1]:
                raise DataError(f'the target "{column}" is missing or not finite', split.where(row), "remove the row")
            return torch.from_numpy(values)
        if isinstance(noted := split.features.get(column), dict) and noted.get("_type") == "ClassLabel":
            return self._numbered(split, column)
        index = {name: number for number, name in enumerate(self.classes)}
        names = [str(value) for value in _class_values(split, column)]
        for row, name in enumerate(names):
            if name not in index:
                what = f'class {name!r} of column "{column}" is not in the training split'
                raise DataError(what, split.where(row), "correct or remove the row")
        return torch.tensor([index[name] for name in names])

    def _numbered(self, split: StoredSplit, column: str) -> Tensor:
        """Read the indices of named classes."""
        assert self.classes is not None
        values = _as_array(split.column(column))
        for row in np.flatnonzero(~((values >= 0) & (values < len(self.classes))))[:1]:
            value = "missing" if np.isnan(values[row]) else f"{values[row]:g}"
            what = f'the target "{column}" is {value}, expected 0 to {len(self.classes) - 1}; -1 means no label'
            raise DataError(what, split.where(int(row)), "use a split with labels, or remove the row")
        return torch.from_numpy(values).long()


def _is_real(split: StoredSplit, column: str) -> bool:
    from pyarrow import types

    data_type = split.schema.field(column).type
    return bool(types.is_floating(data_type) or _is_list(data_type))


def _class_values(split: StoredSplit, column: str) -> list[Any]:
    """Read classes that have no names but their values: integers, text or booleans."""
    from pyarrow import types

    data_type = split.schema.field(column).type
    readable = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
    if not any(is_of(data_type) for is_of in readable):
        what = f'column "{column}" holds {data_type}, expected classes: integers, text or booleans'
        raise DataError(what, f'{split.folder}, split "{split.name}"', "set data.target to another column")
    values: list[Any] = split.column(column).to_pylist()
    if not values:
        raise DataError("no rows", f'{split.folder}, split "{split.name}"', "use a split with rows")
    if None in values:
        raise DataError(f'the target "{column}" is missing', split.where(values.index(None)), "remove the row")
    return values


@dataclass(frozen=True)
class Scaling:
    """Numbers as inputs: standardised by the training rows, with the mean for missing values."""

    names: tuple[str, ...]
    """A name for each input; those of a list `x` are x[0], x[1], …"""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def fit(cls, names: Sequence[str], values: Array) -> Scaling:
        """Compute means and standard deviations (K,) of training rows (N, K)."""
        is_known = ~np.isnan(values)
        count = np.maximum(is_known.sum(axis=0), 1)
        mean = np.where(is_known, values, 0).sum(axis=0) / count
        std = np.sqrt(np.square(np.where(is_known, values - mean, 0)).sum(axis=0) / count)
        return cls(tuple(names), tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))

    def __call__(self, values: Array) -> Tensor:
        """Return the inputs (N, K) of rows, float32."""
        filled = np.where(np.isnan(values), self.mean, values)
        return torch.from_numpy(((filled - np.array(self.mean)) / np.array(self.std)).astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads back."""
        return {"names": list(self.names), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Scaling:
        """Make a scaling from the result of `to_json`."""
        return cls(*(tuple(saved[key]) for key in ("names", "mean", "std")))


def input_names(columns: Mapping[str, Array]) -> list[str]:
    """Return a name for each number of some columns (N, K)."""
    return [
        name if values.shape[1] == 1 else f"{name}[{index}]"
        for name, values in columns.items()
        for index in range(values.shape[1])
    ]
