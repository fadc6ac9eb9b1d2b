"""Data sets of your own, given in Python instead of by a plugin's name."""

from __future__ import annotations

from typing import Any, Self

import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ensemblekit.core.errors import DataError
from ensemblekit.core.plugin import DataInfo, ImageDataset, Splits
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.sources import as_input, read_sample, read_targets


def data_from_datasets(train: Any, test: Any, seed: int, **parameters: Any) -> Data:
    """Your own map-style data sets, or pairs of tensors, made ready like any other data set.

    Samples are pairs of an input (tensor, array, image or number) and a target (class index or real values);
    `parameters` are those of every data set of images, such as ``validation_fraction=0.2``. A sample is read once
    and kept if it fits in memory: data sets with random transforms of their own need ``storage="stream"``.
    """
    return load_data(Given(**parameters).of(train, test), seed)


class Given(ImageDataset):
    """Data sets of your own, given in Python with `data=(train, test)`; what they hold is found out by looking."""

    source = "your own"

    _splits: Splits | None = PrivateAttr(None)

    def of(self, train: Any, test: Any) -> Self:
        labels = [f'data set "{self.name}", {part}' for part in ("train", "test")]
        (train, train_targets), (test, test_targets) = map(_with_targets, (train, test), labels)
        first = train[0][0] if isinstance(train, tuple | list) else read_sample(train, 0, f"{labels[0]} sample 0")[0]
        input_shape = tuple(as_input(first, self.size, f"{labels[0]} sample 0").shape)
        classes = getattr(train, "classes", None)
        if train_targets.is_floating_point():
            info = DataInfo("regression", input_shape, train_targets[0].numel())
        else:
            seen = 1 + max(int(train_targets.max()), int(test_targets.max()))
            info = DataInfo("classification", input_shape, len(classes) if classes else seen)
        self._splits = Splits(train, test, info, classes=tuple(classes) if classes else None)
        return self

    def load(self, seed: int) -> Splits:
        if self._splits is None:
            raise DataError(
                "the data of this spec is given in Python", f'data set "{self.name}"', "pass data=(train, test)"
            )
        return self._splits


class _Labelled(TorchDataset[Any]):
    """A map-style data set with the targets that were read from it, so that they are not read again."""

    def __init__(self, dataset: Any, targets: Tensor) -> None:
        self.dataset, self.targets = dataset, targets
        self.classes = getattr(dataset, "classes", None)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def _with_targets(given: Any, label: str) -> tuple[Any, Tensor]:
    pair = isinstance(given, tuple | list)
    targets = torch.as_tensor(given[1]) if pair else read_targets(given, label)
    if len(targets) == 0:
        raise DataError("it is empty", label, "give at least one sample")
    return (given if pair else _Labelled(given, targets)), targets
