"""Turns a data set into batches: training data in a seeded order and augmented, all else as it is.

Inputs are kept as uint8 (scaled to [0, 1] batch by batch) or float32, in memory or in a stream; both give the same
batches. The order of an epoch and everything random in it are functions of (seed, epoch), so that a run can be
taken up at any epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from math import prod
from typing import Self, get_args

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError, PluginError
from ensemblekit.core.memory import fits_in_memory
from ensemblekit.core.plugin import DataInfo, Dataset, ImageDataset, Splits, Task
from ensemblekit.core.seeds import generator
from ensemblekit.core.threads import one_thread
from ensemblekit.data.sources import MapSource, Source, TensorSource, channel_statistics, make_source
from ensemblekit.data.splitting import hold_out, limit
from ensemblekit.data.transforms import ImageTransform

READY_BYTES = 2**26
"""Inputs of up to this size are made ready once and for all, where nothing random happens to them."""


@dataclass(frozen=True)
class Batch:
    """What one step works on."""

    inputs: Tensor
    """float32 (B, *input_shape)."""
    targets: Tensor
    """Class indices, int64 (B,), or real values, float32 (B, C)."""
    index: Tensor
    """The samples' positions in their split, int64 (B,)."""


@dataclass(frozen=True)
class Split:
    """One part of the data: training, validation or test."""

    inputs: Tensor | MapSource
    """As stored: uint8 or float32 (N, …), or a stream of such samples."""
    targets: Tensor
    """Class indices, int64 (N,), or real values, float32 (N, C); they are where the batches are to be."""
    transform: ImageTransform | None

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Self:
        """The same split with its batches on a device; what is in memory is moved there now, once."""
        inputs = self.inputs.to(device) if isinstance(self.inputs, Tensor) else self.inputs
        transform = self.transform and self.transform.to(device)
        return replace(self, inputs=inputs, targets=self.targets.to(device), transform=transform)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All samples in their own order and without augmentation: for evaluation."""
        return self._batches(torch.arange(len(self)), _batch_lengths(len(self), batch_size), {})

    def training_batches(self, batch_size: int, seed: int, epoch: int, augment: bool = True) -> Iterator[Batch]:
        """All samples once in the order of (seed, epoch), augmented as the data set says.

        The last batch has what is left over, unless that is a single sample, which batch norm cannot train on:
        it then joins the batch before.
        """
        order = torch.randperm(len(self), generator=generator(seed, "order", epoch))
        drawn: dict[str, Tensor] = {}
        if augment and self.transform is not None:
            # for the whole epoch at once: what a sample gets does not depend on the size of batches
            drawn = self.transform.draw(len(self), generator(seed, "augment", epoch))
        return self._batches(order, self.training_batch_lengths(batch_size), drawn)

    def training_batch_lengths(self, batch_size: int) -> list[int]:
        """The sizes of an epoch's batches."""
        lengths = _batch_lengths(len(self), batch_size)
        if len(lengths) > 1 and lengths[-1] == 1 < batch_size:
            lengths = [*lengths[:-2], lengths[-2] + 1]
        return lengths

    def _batches(self, order: Tensor, lengths: list[int], drawn: Mapping[str, Tensor]) -> Iterator[Batch]:
        device = self.targets.device
        index_batches = order.to(device).split(lengths)
        if not drawn and (ready := self._ready) is not None:
            for index in index_batches:
                yield Batch(ready.index_select(0, index), self.targets.index_select(0, index), index)
            return
        drawn_batches = {name: values.to(device).split(lengths) for name, values in drawn.items()}
        stored_batches: Iterator[Tensor]
        if isinstance(self.inputs, Tensor):
            stored_batches = map(self.inputs.index_select, repeat(0), index_batches)
        else:
            stored_batches = (stored.to(device) for stored in self.inputs.stream(order.split(lengths)))
        for step, index in enumerate(index_batches):
            drawn_here = {name: values[step] for name, values in drawn_batches.items()}
            with one_thread():
                inputs = self._transformed(next(stored_batches), drawn_here)
                batch = Batch(inputs, self.targets.index_select(0, index), index)
            yield batch

    @cached_property
    def _ready(self) -> Tensor | None:
        """All inputs as the network sees them without augmentation; None if they are too many to keep."""
        if not isinstance(self.inputs, Tensor):
            return None
        shape = self.inputs.shape[1:] if self.transform is None else self.transform.output_shape
        if 4 * len(self) * prod(shape) > READY_BYTES:
            return None
        return self._transformed(self.inputs, {})

    def _transformed(self, stored: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """What the network sees of a batch of stored inputs."""
        if self.transform is None:
            return stored.div(255) if stored.dtype == torch.uint8 else stored
        return self.transform.augmented(stored, drawn) if drawn else self.transform.plain(stored)


@dataclass(frozen=True)
class Data:
    """A data set that is ready for training."""

    info: DataInfo
    """Its `input_shape` is what the network sees, after resizing and cropping."""
    classes: tuple[str, ...] | None
    train: Split
    validation: Split | None
    """What model selection may look at, disjoint from the training part; None if nothing is held out."""
    test: Split

    def to(self, device: torch.device | str) -> Self:
        """The same data with its batches on a device."""
        validation = self.validation and self.validation.to(device)
        return replace(self, train=self.train.to(device), validation=validation, test=self.test.to(device))


def load_data(dataset: Dataset, seed: int) -> Data:
    """Load a data set, cut its splits, check all of it and make it ready for training.

    The validation part is cut from the training part by seed, before that is limited; the test part is not touched.
    Every sample is read once here, a stream's too, so that bad data is found before any training.
    """
    splits = dataset.load(seed)
    _check_splits(splits, dataset)
    sources = _cut(splits, dataset, seed)
    example = sources["train"].example()
    in_memory = _in_memory(sources, example, dataset)
    sources = {name: source.checked(example, in_memory) for name, source in sources.items()}
    transform = _transform(splits, dataset, sources["train"], example)
    shape = transform.output_shape if transform is not None else tuple(example.shape)
    declared = splits.info.input_shape
    # images may be declared as they are or as they will be: resized or cropped
    if declared != shape and (transform is None or len(declared) != 3 or declared[0] != shape[0]):
        what = f"expected inputs of shape {declared}, got {shape}"
        raise DataError(what, f'data set "{dataset.name}"', "correct what the data set says or what it gives")
    ready = {
        name: Split(source.inputs if isinstance(source, TensorSource) else source, source.targets, transform)
        for name, source in sources.items()
    }
    info = replace(splits.info, input_shape=shape)
    return Data(info, splits.classes, ready["train"], ready.get("validation"), ready["test"])


def _check_splits(splits: object, dataset: Dataset) -> None:
    """A `PluginError` unless a data set gives what it has promised."""
    where = f'data set "{dataset.name}"'
    if not isinstance(splits, Splits):
        raise PluginError(f"load() returned a {type(splits).__name__}", where, "return ensemblekit.Splits(…)")
    if splits.info.task not in get_args(Task):
        tasks = " or ".join(get_args(Task))
        raise PluginError(f'the task of its DataInfo is "{splits.info.task}"', where, f"make it {tasks}")
    declared = dataset.info
    said = (splits.info.task, splits.info.num_outputs)
    if declared is not None and (declared.task, declared.num_outputs) != said:
        what = f"load() gives {splits.info.form}, but `info` says {declared.form}"
        raise PluginError(what, where, "make both say the same")


def _cut(splits: Splits, dataset: Dataset, seed: int) -> dict[str, Source]:
    """The samples of each split."""
    size = dataset.size if isinstance(dataset, ImageDataset) else None
    names = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    sources = {
        name: make_source(given, splits.info, size, f'data set "{dataset.name}", {name}')
        for name, given in names.items()
        if given is not None
    }
    train = sources["train"]
    if "validation" not in sources and dataset.validation_fraction > 0:
        kept, held_out = hold_out(train.targets, dataset.validation_fraction, generator(seed, "validation"))
        # both are numbered as in the data set, so that an error names the sample as its owner knows it
        sources["train"], sources["validation"] = train.select(kept), train.select(held_out)
    for name, count in (("train", dataset.limit_train), ("test", dataset.limit_test)):
        source = sources[name]
        if count is not None and count < len(source):
            sources[name] = source.select(limit(source.targets, count, generator(seed, "limit", name)))
    return sources


def _in_memory(sources: Mapping[str, Source], example: Tensor, dataset: Dataset) -> bool:
    if dataset.storage != "auto":
        return dataset.storage == "memory"
    num_samples = sum(len(source) for source in sources.values() if isinstance(source, MapSource))
    return fits_in_memory(num_samples * example.numel() * example.element_size())


def _transform(splits: Splits, dataset: Dataset, train: Source, example: Tensor) -> ImageTransform | None:
    """What images go through, normalised by the data set's own statistics or else by those of the training part."""
    if not isinstance(dataset, ImageDataset):
        return None
    if example.dim() != 3 and not (dataset.augment or dataset.crop_size or dataset.normalise):
        return None
    transform = ImageTransform.of(dataset, tuple(example.shape))
    if not dataset.normalise:
        return transform
    if splits.mean is not None and splits.std is not None:
        return transform.normalised_by(torch.tensor(splits.mean), torch.tensor(splits.std))
    return transform.normalised_by(*channel_statistics(train.chunks()))


def _batch_lengths(num_samples: int, batch_size: int) -> list[int]:
    full, rest = divmod(num_samples, batch_size)
    return [batch_size] * full + [rest] * (rest > 0)
