"""In-memory data: data sets passed in Python instead of named in a spec."""

from __future__ import annotations

from typing import Any, Self

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ensemblekit.core.errors import DataError
from ensemblekit.core.plugin import DataInfo, Splits
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.sources import as_input, read_sample, read_targets


def data_from_datasets(train: Any, test: Any, seed: int, **parameters: Any) -> Data:
    """Prepare Python data sets for training, as `load_data` does for data set plugins.

    Args:
        train: Training samples: a map-style data set of pairs (input, target), or a pair of tensors (inputs, targets).
            An input is a tensor, an array, an image or a number; a target is a class index or real values. A data
            set's attributes `targets` and `classes` are used if it has them.
        test: Test samples, in either form.
        seed: Seed of the validation split and of `limit_train` and `limit_test`.
        **parameters: Parameters of image data sets, such as ``validation_fraction=0.2``. Each sample is read once and
            kept if all fit in memory: a data set with random transforms needs ``storage="stream"``.

    Returns:
        The training, validation and test splits. Task, input shape and number of classes are inferred.

    Raises:
        DataError: A data set is empty, or a sample has the wrong type, shape or target.
    """
    return load_data(InMemoryData(**parameters).of(train, test), seed)


class InMemoryData(ImageDataset):
    """Data sets passed in Python with data=(train, test); task and shapes are inferred from the samples."""

    source = "Python objects"

    standardise_targets: bool = Field(
        True, description="standardise real targets for training; predictions are in the original units in any case"
    )

    _name: str | None = PrivateAttr("given")  # its name in specs, also if it was not made by the registry
    _splits: Splits | None = PrivateAttr(None)

    def of(self, train: Any, test: Any) -> Self:
        """Set the data: map-style data sets of pairs (input, target), or pairs of tensors (inputs, targets)."""
        labels = [f'data set "{self.name}", {split}' for split in ("train", "test")]
        (train, train_targets), (test, test_targets) = map(_with_targets, (train, test), labels)
        first = train[0][0] if isinstance(train, tuple | list) else read_sample(train, 0, f"{labels[0]} sample 0")[0]
        input_shape = tuple(as_input(first, self.size, f"{labels[0]} sample 0").shape)
        classes = getattr(train, "classes", None)
        if train_targets.is_floating_point():
            info = DataInfo("regression", input_shape, train_targets[0].numel())
        else:
            largest = max(int(train_targets.max()), int(test_targets.max()))
            info = DataInfo("classification", input_shape, len(classes) if classes else 1 + largest)
        self._splits = Splits(
            train,
            test,
            info,
            classes=tuple(classes) if classes else None,
            standardise_targets=self.standardise_targets and info.task == "regression",
        )
        return self

    def in_format(self, version: int) -> Self:
        return self if version > 1 else self.model_copy(update={"standardise_targets": False})

    def load(self, seed: int) -> Splits:
        if self._splits is None:
            raise DataError(
                "this spec uses data passed in Python", f'data set "{self.name}"', "call with data=(train, test)"
            )
        return self._splits


class _DatasetWithTargets(TorchDataset[Any]):
    """A map-style data set with its targets, so that they are read only once."""

    def __init__(self, dataset: Any, targets: Tensor) -> None:
        self.dataset, self.targets = dataset, targets
        self.classes = getattr(dataset, "classes", None)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def _with_targets(samples: Any, label: str) -> tuple[Any, Tensor]:
    is_pair = isinstance(samples, tuple | list)
    targets = torch.as_tensor(samples[1]) if is_pair else read_targets(samples, label)
    if len(targets) == 0:
        raise DataError("no samples", label, "provide at least one sample")
    return (samples if is_pair else _DatasetWithTargets(samples, targets)), targets
