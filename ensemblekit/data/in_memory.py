"""In-memory data: data sets passed in Python instead of named in a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from ensemblekit.core.dataset import DataInfo, Dataset, Splits
from ensemblekit.core.errors import DataError
from ensemblekit.core.seeds import generator
from ensemblekit.core.tasks import TASKS
from ensemblekit.data.arrays import frames_of
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.python_data import FORMS, Samples, check_part, read_parts, split_parts
from ensemblekit.data.sources import as_input, check_finite_samples, check_targets, read_sample
from ensemblekit.data.splitting import hold_out

_SPLITS = {1: ("train",), 2: ("train", "test"), 3: ("train", "validation", "test")}
"""The splits that one, two or three parts stand for; of a single part the test split is held out."""

MANY_CLASSES, MANY_TIMES = 1000, 10
"""Labels that need more outputs than both this number and so many times the distinct labels are not class indices."""


def data_from_datasets(train: Any, test: Any, seed: int, **parameters: Any) -> Data:
    """Prepare Python data sets for training, as `load_data` does for data set plugins.

    Args:
        train: Training samples: a map-style data set of pairs (input, target), or a pair (inputs, targets) of tensors,
            arrays, frames or lists. An input is a tensor, an array, an image or a number; a target is a class index,
            several labels (integers or booleans of 0 and 1) or real values. A data set's attributes `targets` and
            `classes` are used if it has them.
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


def python_dataset(dataset: Dataset, data: Any) -> Dataset:
    """Return the data set that loads data passed in Python, with the parameters of the spec's.

    Frames are given to a data set that takes frames, such as `table`; other data are in-memory data.

    Raises:
        DataError: the data has none of the accepted forms.
    """
    frames = frames_of(data)
    taken = None if frames is None else dataset.with_frames(frames)
    return InMemoryData.in_place_of(dataset).of(*split_parts(data)) if taken is None else taken


class InMemoryData(ImageDataset):
    """Data passed in Python with data=…; task and shapes are inferred from the samples."""

    source = "Python objects"

    standardise_targets: bool = Field(
        True, description="standardise real targets for training; predictions are in the original units in any case"
    )
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of the samples held out for testing, by the seed, if one data set is passed"
    )

    _name: str | None = PrivateAttr("given")  # its name in specs, also if it was not made by the registry
    _samples: dict[str, Samples] | None = PrivateAttr(None)
    _info: DataInfo | None = PrivateAttr(None)

    @classmethod
    def in_place_of(cls, dataset: Dataset) -> Self:
        """Return in-memory data with the parameters of another data set, where they were set and both have them."""
        if isinstance(dataset, cls):
            return dataset.model_copy()
        shared = dataset.model_fields_set & set(cls.model_fields)
        return cls(**{name: getattr(dataset, name) for name in shared})

    def of(self, *parts: Any) -> Self:
        """Set the data: all of it, (train, test) or (train, validation, test), each a pair (X, y) or a data set."""
        splits = _SPLITS[len(parts)]
        labels = [f'data set "{self.name}", {split}' for split in splits]
        for part in parts:
            check_part(part)
        self._samples = dict(zip(splits, read_parts(parts, labels), strict=True))
        self._info = self._infer(labels[0])
        return self

    def _infer(self, label: str) -> DataInfo:
        """Infer task and shapes from the samples."""
        assert self._samples is not None
        train = self._samples["train"]
        source = train.source
        first = source[0][0] if isinstance(source, tuple) else read_sample(source, 0, f"{label} sample 0")[0]
        input_shape = tuple(as_input(first, self.size, f"{label} sample 0").shape)
        if train.targets.is_floating_point():
            return DataInfo("regression", input_shape, train.targets[0].numel())
        if _are_labels(train.targets):
            return DataInfo("multilabel", input_shape, train.targets.shape[1])
        if train.classes:
            return DataInfo("classification", input_shape, len(train.classes))
        return DataInfo("classification", input_shape, _num_classes(list(self._samples.values()), label))

    def load(self, seed: int) -> Splits:
        if self._samples is None or self._info is None:
            what, where = "this spec uses data passed in Python", f'data set "{self.name}"'
            fix = "use it from Python with data=…, or name a data set of its own"
            raise DataError(what, where, fix, python_fix=f"pass it with data=…: {FORMS}")
        samples = dict(self._samples)
        indices: dict[str, Tensor] = {}
        if "test" not in samples:
            indices = self._held_out(samples["train"], seed)
            samples = {split: samples["train"].select(chosen) for split, chosen in indices.items()}
        validation = samples.get("validation")
        return Splits(
            samples["train"].source,
            samples["test"].source,
            self._info,
            validation=None if validation is None else validation.source,
            classes=samples["train"].classes,
            standardise_targets=self.standardise_targets and TASKS[self._info.task].standardises_targets,
            indices=indices,
        )

    def in_format(self, version: int) -> Self:
        return self if version > 1 else self.model_copy(update={"standardise_targets": False})

    def _held_out(self, samples: Samples, seed: int) -> dict[str, Tensor]:
        """Split samples into training and test samples; returns the indices of both."""
        assert self._info is not None
        # checked here, where samples still have the numbers that their owner knows
        label = f'data set "{self.name}"'
        if isinstance(samples.source, tuple):
            check_finite_samples(samples.source[0], label)
        targets = check_targets(samples.targets, self._info, label)
        kept, held_out = hold_out(targets, self.test_fraction, generator(seed, "given", "test"))
        return {"train": kept, "test": held_out}


def _are_labels(targets: Tensor) -> bool:
    """Whether integers or booleans are labels of 0 and 1, several for each sample (N, C)."""
    return targets.ndim == 2 and targets.shape[1] > 1 and bool(((targets == 0) | (targets == 1)).all())


def _num_classes(parts: Sequence[Samples], label: str) -> int:
    """Return one more than the largest label; a `DataError` if nearly all of so many classes would have no sample."""
    labels = torch.cat([samples.targets.flatten().unique().cpu() for samples in parts]).unique()
    num_classes = 1 + int(labels.max())
    if num_classes > MANY_CLASSES and num_classes > MANY_TIMES * len(labels):
        what = f"labels run from {int(labels.min())} to {int(labels.max())}, but only {len(labels)} differ"
        raise DataError(what, label, "number the classes from 0, or pass the labels as text")
    return num_classes
