"""The forms in which Python data can be passed: pairs (X, y), data sets, and tuples of these for the splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from ensemblekit.core.errors import DataError
from ensemblekit.data.arrays import as_features, as_labels, is_array, is_frame
from ensemblekit.data.sources import read_targets

FORMS = (
    "give a pair (X, y) of arrays, tensors, frames or lists; a map-style data set of pairs (input, target); or several "
    "of these: (train, test) or (train, validation, test)"
)


@dataclass(frozen=True)
class Samples:
    """The samples of one split, with their targets as class indices or real values."""

    source: Any
    """A pair of tensors (inputs, targets), or a map-style data set."""
    targets: Tensor
    classes: tuple[str, ...] | None = None
    """Names of the classes, if the data set or the targets name them."""

    def select(self, indices: Tensor) -> Samples:
        """Return some of the samples."""
        targets = self.targets[indices]
        if isinstance(self.source, tuple):
            return Samples((self.source[0][indices.to(self.source[0].device)], targets), targets, self.classes)
        return Samples(DatasetWithTargets(self.source, targets, indices), targets, self.classes)


class DatasetWithTargets(TorchDataset[Any]):
    """Some samples of a map-style data set, with their targets, so that these are read only once."""

    def __init__(self, dataset: Any, targets: Tensor, indices: Tensor | None = None) -> None:
        self.dataset, self.targets = dataset, targets
        self.indices = None if indices is None else indices.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index if self.indices is None else self.indices[index]]


def split_parts(data: Any) -> list[Any]:
    """Split data passed in Python into its one, two or three parts, each a pair (X, y) or a data set.

    A tuple or list of two arrays is one pair (X, y). A tuple or list of two or three pairs or data sets has one part
    for each split. A list of numbers, nested or not, is an array; a list of more than three pairs (input, target) is a
    data set.

    Raises:
        DataError: the data has none of these forms.
    """
    if _is_part(data):
        return [data]
    if isinstance(data, tuple | list) and len(data) in (2, 3) and all(_is_part(part) for part in data):
        return list(data)
    raise _unknown_form(data)


def check_part(part: Any) -> None:
    """Raise a `DataError` unless this is a pair (X, y) or a map-style data set."""
    if not _is_part(part):
        raise _unknown_form(part)


def read_parts(
    parts: Sequence[Any], labels: Sequence[str], classes: tuple[str, ...] | None = None
) -> tuple[Samples, ...]:
    """Read the targets of all parts, and number the classes if they are named.

    Args:
        parts: pairs (X, y) or map-style data sets.
        labels: the names of the parts for error messages.
        classes: the names of the classes, if they are known. Default: all names that occur, sorted.

    Raises:
        DataError: a part has no samples, or not one target for each.
    """
    read = [_read(part, label) for part, label in zip(parts, labels, strict=True)]
    named = [targets for _, targets in read if isinstance(targets, list)]
    if named and len(named) < len(read):
        what = "the targets are names of classes in one part and numbers in another"
        raise DataError(what, ", ".join(labels), "use one of them for all parts")
    if named:
        classes = classes or tuple(sorted(set().union(*named)))
    index = {name: number for number, name in enumerate(classes or ())}
    samples = []
    for (source, targets), label in zip(read, labels, strict=True):
        numbers = _numbered(targets, index, label) if isinstance(targets, list) else targets
        source = source if isinstance(source, TorchDataset) else (source, numbers)
        samples.append(Samples(source, numbers, classes if named else _class_names(source)))
    return tuple(samples)


def _read(part: Any, label: str) -> tuple[Any, Tensor | list[str]]:
    """Inputs or a data set, and the targets."""
    if type(part) is TensorDataset and len(part.tensors) == 2:
        part = part.tensors
    if not _is_pair(part):
        targets: Tensor | list[str] = read_targets(part, label)
        _check_not_empty(targets, label)
        return DatasetWithTargets(part, targets), targets  # type: ignore[arg-type]
    inputs, targets = as_features(part[0], label), as_labels(part[1], label)
    if len(inputs) != len(targets):
        raise DataError(f"{len(inputs)} inputs, but {len(targets)} targets", label, "provide one target per sample")
    _check_not_empty(targets, label)
    return inputs.detach(), targets


def _check_not_empty(targets: Tensor | list[str], label: str) -> None:
    if len(targets) == 0:
        raise DataError("no samples", label, "provide at least one sample")


def _numbered(names: list[str], index: Mapping[str, int], label: str) -> Tensor:
    for sample, name in enumerate(names):
        if name not in index:
            what = f'"{name}" is not a class of the run: {", ".join(index):.200}'
            raise DataError(what, f"{label} sample {sample}", "correct the target, or remove the sample")
    return torch.tensor([index[name] for name in names])


def _class_names(source: Any) -> tuple[str, ...] | None:
    classes = getattr(source.dataset, "classes", None) if isinstance(source, DatasetWithTargets) else None
    return tuple(map(str, classes)) if classes else None


def _is_part(value: Any) -> bool:
    return _is_pair(value) or _is_dataset(value)


def _is_pair(value: Any) -> bool:
    is_group = isinstance(value, tuple | list) and not is_array(value)
    return is_group and len(value) == 2 and _is_column(value[0]) and _is_column(value[1])


def _is_column(value: Any) -> bool:
    """Whether a value has one entry for each sample: an array, or a list of names."""
    return is_array(value) or (isinstance(value, list) and bool(value) and isinstance(value[0], str))


def _is_dataset(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 3 and isinstance(value[0], tuple | list) and len(value[0]) == 2 and not is_array(value)
    if isinstance(value, tuple | str | bytes | Mapping | DataLoader | IterableDataset) or is_array(value):
        return False
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _unknown_form(data: Any) -> DataError:
    return DataError(f"data cannot be {_description(data)}", "data", _hint(data))


def _hint(data: Any) -> str:
    """How to pass this data, or all accepted forms."""
    items = [data, *data] if isinstance(data, tuple | list) and len(data) <= 4 else [data]
    if any(isinstance(item, DataLoader) for item in items):
        return f"give the loader's data set: loader.dataset; {FORMS}"
    if any(isinstance(item, IterableDataset) for item in items):
        return f"a data set needs __getitem__ and __len__; {FORMS}"
    if is_frame(data):
        fix = 'name the target in the spec, {"data": {"name": "table", "target": "…"}}, or separate it: '
        return f'{fix}(frame.drop(columns="target"), frame["target"]); {FORMS}'
    if isinstance(data, tuple | list) and len(data) == 4 and all(map(is_array, data)):
        return f"give ((X_train, y_train), (X_test, y_test)); {FORMS}"
    return FORMS


def _description(data: Any) -> str:
    if isinstance(data, tuple | list) and 0 < len(data) <= 4:
        return f"a {type(data).__name__} of {', '.join(type(item).__name__ for item in data)}"
    return f"of type {type(data).__name__}"
