"""Loading: a data set becomes batches, shuffled and augmented for training, in their own order for evaluation.

Inputs are stored as uint8 (scaled to [0, 1] batch by batch) or float32, in memory or as a stream; both give the same
batches. The order of an epoch and its augmentation are functions of (seed, epoch), so that a run can be resumed at any
epoch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from math import prod
from typing import Any, Self, get_args

import torch
from torch import Tensor

from ensemblekit.core.augmentation import BatchAugmentation
from ensemblekit.core.dataset import DataInfo, Dataset, Splits
from ensemblekit.core.errors import DataError, PluginError
from ensemblekit.core.memory import fits_in_memory
from ensemblekit.core.objective import Mix
from ensemblekit.core.plugin import Task
from ensemblekit.core.seeds import generator
from ensemblekit.core.threads import one_thread
from ensemblekit.data.fingerprint import Fingerprint, fingerprint
from ensemblekit.data.folds import train_folds
from ensemblekit.data.grouping import check_groups
from ensemblekit.data.hashing import sha256_of_tensors
from ensemblekit.data.image_dataset import ImageDataset
from ensemblekit.data.scaling import TargetScaling, scale_targets
from ensemblekit.data.sources import ChannelStatistics, MapSource, Source, TensorSource, make_source
from ensemblekit.data.splitting import hold_out, limit
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.data.weighting import train_importance

MAX_CACHED_BYTES = 2**26
"""Splits up to this size are transformed once and cached if no augmentation is used."""


@dataclass(frozen=True)
class Batch:
    """Samples of one training step or one step of an evaluation."""

    inputs: Tensor
    """float32 (B, *input_shape)."""
    targets: Tensor
    """Class indices, int64 (B,), or real values, float32 (B, C), standardised if the data set says so."""
    index: Tensor
    """Indices of the samples in their split, int64 (B,)."""
    partner: Tensor | None = None
    """If samples are mixed, the index in the batch of the one that each is mixed with, int64 (B,)."""
    share: Tensor | None = None
    """If samples are mixed, the share of each in its mixture, float32 (B,); that of the partner is the rest."""
    importance: Tensor | None = None
    """How much each sample counts in the objective, float32 (B,); None: 1."""

    @property
    def mix(self) -> Mix | None:
        """How samples were mixed; None if they were not."""
        return None if self.partner is None or self.share is None else Mix(self.partner, self.share)


@dataclass(frozen=True)
class Split:
    """One part of the data: training, validation or test."""

    inputs: Tensor | MapSource
    """As stored: uint8 or float32 (N, …), or a stream of such samples."""
    targets: Tensor
    """Class indices, int64 (N,), or real values, float32 (N, C), standardised if the data set says so; batches are made
    on their device."""
    transform: ImageTransform | None
    """Transform of stored images into network inputs; None if inputs are not images."""
    indices: Tensor | None = None
    """Indices of the samples in their data set, int64 (N,), on the CPU, before any were held out or left out: those of
    validation samples are in the training data they were held out from, or in a table that all splits were taken from.
    None: all samples in their order."""
    mix: BatchAugmentation | None = None
    """How training samples are mixed with others of their batch; None: they are not."""
    importance: Tensor | None = None
    """How much each training sample counts in the objective, float32 (N,), 1 on average; None: all count the same."""
    groups: Tensor | None = None
    """The number of each training sample's group, int64 (N,), on the CPU; see `Splits.groups`."""
    folds: Tensor | None = None
    """The fold of each training sample, int64 (N,): member i is trained without fold i mod `Dataset.folds`. None: all
    members are trained on all samples."""

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def is_augmented(self) -> bool:
        """Whether training inputs differ from epoch to epoch."""
        return self.mix is not None or (self.transform is not None and bool(self.transform.augmentations))

    def to(self, device: torch.device | str) -> Self:
        """Return the same split with its batches on a device; inputs in memory are moved there now, once."""
        inputs = self.inputs.to(device) if isinstance(self.inputs, Tensor) else self.inputs
        transform = self.transform and self.transform.to(device)
        importance = None if self.importance is None else self.importance.to(device)
        folds = None if self.folds is None else self.folds.to(device)
        targets = self.targets.to(device)
        return replace(self, inputs=inputs, targets=targets, transform=transform, importance=importance, folds=folds)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Iterate over all samples in their own order, without augmentation: for evaluation."""
        return self._batches(torch.arange(len(self)), _batch_lengths(len(self), batch_size), [])

    def training_batches(
        self, batch_size: int, seed: int, epoch: int, augment: bool = True, first_step: int = 0
    ) -> Iterator[Batch]:
        """Iterate over all samples once, shuffled and augmented.

        The last batch has the remaining samples, unless it is a single one, which batch norm cannot train on: then it
        joins the batch before.

        Args:
            batch_size: Samples per batch.
            seed: Seed of the run.
            epoch: Number of the epoch; order and augmentation are functions of (seed, epoch).
            augment: Whether to apply the data set's augmentation.
            first_step: Number of batches to leave out at the beginning, without reading their samples.
        """
        order = torch.randperm(len(self), generator=generator(seed, "order", epoch))
        sampled: list[Tensor] = []
        if augment and self.transform is not None:
            # For the whole epoch at once, so that a sample's augmentation does not depend on the batch size.
            sampled = self.transform.sample(len(self), generator(seed, "augment", epoch))
        lengths = self.training_batch_lengths(batch_size)
        first = sum(lengths[:first_step])
        batches = self._batches(order[first:], lengths[first_step:], [values[first:] for values in sampled])
        if not augment or self.mix is None:
            return batches
        numbers = self.mix.sample(len(self), generator(seed, "mix", epoch))[first:].to(self.targets.device)
        return map(self._mixed, batches, numbers.split(lengths[first_step:]))

    def training_batch_lengths(self, batch_size: int) -> list[int]:
        """Return the sizes of the batches of a training epoch."""
        lengths = _batch_lengths(len(self), batch_size)
        if len(lengths) > 1 and lengths[-1] == 1 < batch_size:
            lengths = [*lengths[:-2], lengths[-2] + 1]
        return lengths

    def _batches(self, order: Tensor, lengths: list[int], sampled: Sequence[Tensor]) -> Iterator[Batch]:
        device = self.targets.device
        index_batches = order.to(device).split(lengths)
        if not sampled and (cached := self._cached_inputs) is not None:
            for index in index_batches:
                yield self._batch(cached.index_select(0, index), index)
            return
        sampled_batches = [values.to(device).split(lengths) for values in sampled]
        stored_batches: Iterator[Tensor]
        if isinstance(self.inputs, Tensor):
            stored_batches = map(self.inputs.index_select, repeat(0), index_batches)
        else:
            stored_batches = (stored.to(device) for stored in self.inputs.stream(order.split(lengths)))
        for step, index in enumerate(index_batches):
            with one_thread():
                inputs = self._transformed(next(stored_batches), [values[step] for values in sampled_batches])
                batch = self._batch(inputs, index)
            yield batch

    def _batch(self, inputs: Tensor, index: Tensor) -> Batch:
        importance = None if self.importance is None else self.importance.index_select(0, index)
        return Batch(inputs, self.targets.index_select(0, index), index, importance=importance)

    def _mixed(self, batch: Batch, sampled: Tensor) -> Batch:
        assert self.mix is not None
        with one_thread():
            inputs, partner, share = self.mix.apply(batch.inputs, sampled)
        size = (len(batch.inputs),)
        if inputs.shape != batch.inputs.shape or partner.shape != size or share.shape != size:
            got = ", ".join(str(tuple(tensor.shape)) for tensor in (inputs, partner, share))
            what = f"apply() returned tensors of shapes {got}"
            fix = f"return inputs {tuple(batch.inputs.shape)}, partners {size} and shares {size}"
            raise PluginError(what, f'mix "{self.mix.name}"', fix, plugin=self.mix.name)
        return replace(batch, inputs=inputs, partner=partner, share=share)

    @cached_property
    def _cached_inputs(self) -> Tensor | None:
        """All inputs, transformed without augmentation; None if they are streamed or too large to keep."""
        if not isinstance(self.inputs, Tensor):
            return None
        shape = self.inputs.shape[1:] if self.transform is None else self.transform.output_shape
        if 4 * len(self) * prod(shape) > MAX_CACHED_BYTES:
            return None
        return self._transformed(self.inputs, [])

    def _transformed(self, stored: Tensor, sampled: Sequence[Tensor]) -> Tensor:
        """Turn stored inputs into network inputs, augmented if random parameters were sampled for them."""
        if self.transform is None:
            return stored.div(255) if stored.dtype == torch.uint8 else stored
        return self.transform.augmented(stored, sampled) if sampled else self.transform.plain(stored)


@dataclass(frozen=True)
class Data:
    """A data set that is ready for training."""

    info: DataInfo
    """Its `input_shape` is that of the network's input, after resizing and cropping."""
    classes: tuple[str, ...] | None
    """Names of the classes in the order of their indices; None if they have none."""
    train: Split
    validation: Split | None
    """Samples for model selection, disjoint from the training split; None if none are held out."""
    test: Split
    fingerprint: Fingerprint = field(default_factory=dict)
    """What tells this data from other data."""
    notes: tuple[tuple[str, str], ...] = ()
    """Rows (label, text) that the plan shows; see `Splits.notes`."""
    target_scaling: TargetScaling | None = None
    """How real targets were standardised; None if they are in their original units."""
    preparation: Mapping[str, Any] | None = None
    """What the data set needs to prepare new files; see `Splits.preparation`."""

    @property
    def restore_targets(self) -> Callable[[Tensor], Tensor] | None:
        """Converts standardised targets to their original units; None if they are in these."""
        return None if self.target_scaling is None else self.target_scaling.restore

    def to(self, device: torch.device | str) -> Self:
        """Return the same data with its batches on a device."""
        validation = self.validation and self.validation.to(device)
        return replace(self, train=self.train.to(device), validation=validation, test=self.test.to(device))

    def mixed_by(self, mix: BatchAugmentation | None) -> Self:
        """Return the same data with training samples that are mixed with others of their batch."""
        return replace(self, train=replace(self.train, mix=mix))


def load_data(dataset: Dataset, seed: int) -> Data:
    """Load a data set, split it, check every sample and prepare it for training.

    The validation split is taken from the training samples by the seed, before `limit_train` is applied. Every sample
    is read once here, also of a stream, so that bad data is found before training starts.

    Args:
        dataset: A data set plugin, for example ``Digits(validation_fraction=0.2)``.
        seed: Seed of the splits, unless the data set has its own `split_seed`.

    Returns:
        The training, validation and test splits, in memory on the CPU or as streams.

    Raises:
        DataError: Data is missing, or a sample cannot be read or has a wrong shape, dtype or target.
        PluginError: The data set does not return what its `info` declares.
    """
    seed = seed if dataset.split_seed is None else dataset.split_seed
    splits = dataset.load(seed)
    _check_splits(splits, dataset)
    sources = _make_sources(splits, dataset, seed)
    classes = splits.classes or _names_of_signs(sources)
    example = sources["train"].example()
    in_memory = _use_memory(sources, example, dataset)
    statistics = _statistics(splits, dataset, example)
    sources = {
        name: source.checked(example, in_memory, statistics if name == "train" else None)
        for name, source in sources.items()
    }
    known_by = fingerprint(sources, example)
    transform = _transform(splits, dataset, statistics, example)
    shape = transform.output_shape if transform is not None else tuple(example.shape)
    declared = splits.info.input_shape
    # Images may be declared as stored or as the network's input, resized and cropped.
    if declared != shape and (transform is None or len(declared) != 3 or declared[0] != shape[0]):
        what = f"expected inputs of shape {declared}, got {shape}"
        raise DataError(what, f'data set "{dataset.name}"', "correct `info` or the inputs")
    values = {name: source.targets for name, source in sources.items()}
    targets, scaling = scale_targets(values, splits.standardise_targets, dataset)
    indices = _own_indices(splits, sources, dataset)
    importance = train_importance(splits.weights, sources["train"].indices, dataset)
    if importance is not None:
        known_by["train"]["weights_sha256"] = sha256_of_tensors([importance])
    groups = None if splits.groups is None else splits.groups[sources["train"].indices]
    folds = train_folds(splits.groups, sources["train"], dataset, seed)
    if folds is not None:
        known_by["train"]["folds_sha256"] = sha256_of_tensors([folds])
    parts = {
        name: Split(
            source.inputs if isinstance(source, TensorSource) else source, targets[name], transform, indices[name]
        )
        for name, source in sources.items()
    }
    return Data(
        info=replace(splits.info, input_shape=shape),
        classes=classes,
        train=replace(parts["train"], importance=importance, groups=groups, folds=folds),
        validation=parts.get("validation"),
        test=parts["test"],
        fingerprint=known_by,
        notes=splits.notes,
        target_scaling=scaling,
        preparation=splits.preparation,
    )


def load_test_source(dataset: Dataset, seed: int) -> Source:
    """Load only the test samples of a data set, unchecked, in the order of `load_data`: for looking at a few of them.

    Raises:
        DataError: Data is missing.
        PluginError: The data set does not return what its `info` declares.
    """
    seed = seed if dataset.split_seed is None else dataset.split_seed
    splits = dataset.load(seed)
    _check_splits(splits, dataset)
    return _make_sources(splits, dataset, seed)["test"]


def _check_splits(splits: object, dataset: Dataset) -> None:
    """Raise a `PluginError` unless a data set returned what it declares."""
    where = f'data set "{dataset.name}"'
    if not isinstance(splits, Splits):
        raise PluginError(f"load() returned a {type(splits).__name__}", where, "return ensemblekit.Splits(…)")
    if splits.info.task not in get_args(Task):
        tasks = " or ".join(get_args(Task))
        raise PluginError(f'unknown task "{splits.info.task}" in its DataInfo', where, f"set it to {tasks}")
    declared = dataset.info
    returned = (splits.info.task, splits.info.num_outputs)
    if declared is not None and (declared.task, declared.num_outputs) != returned:
        what = f"load() returned {splits.info.form}, but `info` declares {declared.form}"
        raise PluginError(what, where, "make both equal")
    _check_preparation(splits.preparation, where)
    check_groups(splits, where)


def _check_preparation(preparation: Mapping[str, Any] | None, where: str) -> None:
    """Raise a `PluginError` unless a preparation can be saved and read back unchanged."""
    fix = "use strings as keys, and lists, strings, finite numbers, booleans and None as values"
    try:
        unchanged = json.loads(json.dumps(preparation, allow_nan=False)) == preparation
    except (TypeError, ValueError) as error:
        raise PluginError(f"load() returned a preparation that JSON cannot save: {error}", where, fix) from error
    if not unchanged:
        raise PluginError("load() returned a preparation that JSON does not give back unchanged", where, fix)


def _make_sources(splits: Splits, dataset: Dataset, seed: int) -> dict[str, Source]:
    """Make the sources of the splits, with validation samples held out and limits applied."""
    size = dataset.size if isinstance(dataset, ImageDataset) else None
    loaded = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    sources = {
        name: make_source(samples, splits.info, size, f'data set "{dataset.name}", {name}')
        for name, samples in loaded.items()
        if samples is not None
    }
    train = sources["train"]
    if "validation" not in sources and dataset.validation_fraction > 0:
        random = generator(seed, "validation")
        kept, held_out = hold_out(train.targets, dataset.validation_fraction, random, splits.groups)
        # Both keep the data set's own numbering, so that errors name samples as their owner knows them.
        sources["train"], sources["validation"] = train.select(kept), train.select(held_out)
    for name, count in (("train", dataset.limit_train), ("test", dataset.limit_test)):
        source = sources[name]
        if count is not None and count < len(source):
            sources[name] = source.select(limit(source.targets, count, generator(seed, "limit", name)))
    return sources


def _own_indices(splits: Splits, sources: Mapping[str, Source], dataset: Dataset) -> dict[str, Tensor]:
    """Return the indices of each split's samples as their owner knows them."""
    indices = {}
    for name, source in sources.items():
        loaded_as = "train" if name == "validation" and splits.validation is None else name
        own = splits.indices.get(loaded_as)
        if own is not None and (own.ndim != 1 or len(own) <= int(source.indices.max())):
            what = f"load() returned indices of shape {tuple(own.shape)} for the {loaded_as} split"
            raise PluginError(what, f'data set "{dataset.name}"', "return one index for each sample")
        indices[name] = source.indices if own is None else own[source.indices]
    return indices


def _names_of_signs(sources: Mapping[str, Source]) -> tuple[str, str] | None:
    """Name the classes -1 and +1; None if targets are class indices. A `DataError` if splits differ in this."""
    if not any(source.signed for source in sources.values()):
        return None
    for source in sources.values():
        if not source.signed and bool((source.targets == 0).any()):
            what = "targets are class indices here, but -1 and +1 in another split"
            raise DataError(what, source.label, "write the classes as -1 and +1, or as 0 and 1, in all splits")
    return "-1", "+1"


def _use_memory(sources: Mapping[str, Source], example: Tensor, dataset: Dataset) -> bool:
    """Decide whether to keep the samples of map-style data sets in memory."""
    if dataset.storage != "auto":
        return dataset.storage == "memory"
    num_samples = sum(len(source) for source in sources.values() if isinstance(source, MapSource))
    return fits_in_memory(num_samples * example.numel() * example.element_size())


def _statistics(splits: Splits, dataset: Dataset, example: Tensor) -> ChannelStatistics | None:
    """Make the statistics that the training images are normalised by; None if they are not, or if they are known."""
    known = splits.mean is not None and splits.std is not None
    needed = isinstance(dataset, ImageDataset) and dataset.normalise and not known and example.dim() == 3
    return ChannelStatistics() if needed else None


def _transform(
    splits: Splits, dataset: Dataset, statistics: ChannelStatistics | None, example: Tensor
) -> ImageTransform | None:
    """Make the transform of images, normalised by the data set's statistics or else by those of the training split."""
    if not isinstance(dataset, ImageDataset):
        return None
    if example.dim() != 3 and not (dataset.augment or dataset.crop_size or dataset.normalise):
        return None
    transform = ImageTransform.of(dataset, tuple(example.shape))
    if not dataset.normalise:
        return transform
    if statistics is not None:
        return transform.normalised_by(*statistics.result())
    return transform.normalised_by(torch.tensor(splits.mean), torch.tensor(splits.std))


def _batch_lengths(num_samples: int, batch_size: int) -> list[int]:
    full, rest = divmod(num_samples, batch_size)
    return [batch_size] * full + [rest] * (rest > 0)
