"""Sources of samples: the tensors or the map-style data set behind a split, with every sample checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import DataError
from ensemblekit.core.tasks import TASKS, are_signs
from ensemblekit.core.tensors import describe_tensor
from ensemblekit.data.hashing import TensorHash
from ensemblekit.data.reading_ahead import read_ahead
from ensemblekit.data.resizing import resize_tensor

CHUNK_BYTES = 2**24
"""Samples are checked and resized in chunks of this size, which bounds the memory for temporaries."""
REREAD = 8
"""Samples that are read twice, to find out whether a data set gives the same ones each time."""
UNREADABLE = (OSError, RuntimeError, SyntaxError, ValueError)
"""Exceptions of decoders for files that they cannot read (Pillow: SyntaxError for a broken PNG)."""


@runtime_checkable
class BatchReader(Protocol):
    """A map-style data set that can read many samples at once, in threads and before they are needed."""

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read samples: inputs (B, …), the same as by index and the same each time, and their targets (B, …)."""


class ChannelStatistics:
    """The channel means and standard deviations of images (N, C, H, W), scaled to [0, 1], that are added in chunks."""

    def __init__(self) -> None:
        self._count, self._total, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, images: Tensor) -> None:
        """Add images, uint8 or floating (N, C, H, W)."""
        self._count += images.numel() // images.shape[1]
        if images.dtype == torch.uint8:
            # Counting the 256 values is exact, and needs neither the time nor the memory of float64 images.
            counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)])
            values = torch.arange(256)
            self._total = self._total + (counts * values).sum(dim=1).double() / 255
            self._squares = self._squares + (counts * values.square()).sum(dim=1).double() / 255**2
        else:
            doubles = images.to(torch.float64)
            self._total = self._total + doubles.sum(dim=(0, 2, 3))
            self._squares = self._squares + doubles.square().sum(dim=(0, 2, 3))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the means and the standard deviations, float64 (C,)."""
        mean = self._total / self._count
        return mean, (self._squares / self._count - mean.square()).clamp(min=0).sqrt()


@dataclass(frozen=True)
class TensorSource:
    """Samples in memory: inputs (N, …), uint8 or float32, and targets."""

    inputs: Tensor
    indices: Tensor
    """Indices of the samples in the data set, before any were held out or left out."""
    targets: Tensor
    label: str
    repeatable: bool = True
    """Whether reading the samples again would give the same inputs."""
    signed: bool = False
    """Whether its two classes are written as -1 and +1 by their owner; `targets` has them as 0 and 1."""

    def __len__(self) -> int:
        return len(self.inputs)

    def select(self, indices: Tensor) -> Self:
        """Return the source of some of the samples."""
        inputs, own_indices, targets = self.inputs[indices], self.indices[indices], self.targets[indices]
        return replace(self, inputs=inputs, indices=own_indices, targets=targets)

    def example(self) -> Tensor:
        """Return the input of the first sample."""
        return self.inputs[0]

    def chunks(self) -> Iterator[Tensor]:
        """Iterate over all inputs in order, several at a time."""
        return iter(self.inputs.split(_chunk_length(self.inputs[0])))

    def checked(self, example: Tensor, in_memory: bool, statistics: ChannelStatistics | None = None) -> TensorSource:
        """Return this source; a `DataError` if its inputs differ from the example in shape or dtype."""
        _check_same_type(self.inputs[0], example, f"{self.label} sample 0")
        if statistics is not None:
            for chunk in self.chunks():
                statistics.add(chunk)
        return self


@dataclass(frozen=True)
class MapSource(TorchDataset[Tensor]):
    """Samples of a map-style data set, read on demand; as a data set itself, it has the inputs only."""

    dataset: TorchDataset[Any]
    indices: Tensor
    """Indices of the samples in the data set."""
    targets: Tensor
    """Their targets, in the same order."""
    label: str
    size: int | None
    """Side that images are resized to; None: not at all."""
    expected: Tensor | None = None
    """An input whose shape and dtype all others must have; None: not checked yet."""
    inputs_sha256: str | None = None
    """The sha256 of all inputs; None: not read yet, or different each time they are read."""
    signed: bool = False
    """As for `TensorSource`."""

    def __len__(self) -> int:
        return len(self.indices)

    def select(self, indices: Tensor) -> Self:
        """Return the source of some of the samples."""
        return replace(self, indices=self.indices[indices], targets=self.targets[indices])

    def __getitem__(self, index: int) -> Tensor:
        sample_index = int(self.indices[index])
        where = f"{self.label} sample {sample_index}"
        value, target = read_sample(self.dataset, sample_index, where)
        sample = as_input(value, self.size, where)
        if self.expected is not None:
            _check_same_type(sample, self.expected, where)
        _check_finite(sample, where)
        self._check_target(as_target(target, where), index, where)
        return sample

    def _check_target(self, read: Tensor, index: int, where: str) -> None:
        if not self._are_targets(read, torch.tensor(index)):
            expected = self._written_targets(torch.tensor(index))
            what = f"target is {read.tolist()}, but {expected.tolist()} in the data set's attribute `targets`"
            raise DataError(what, where, "make both equal")

    def _are_targets(self, read: Tensor, index: Tensor) -> bool:
        """Whether targets that were read are those at an index, or at several (B,)."""
        expected = self._written_targets(index)
        dtype = torch.float32 if expected.is_floating_point() else expected.dtype
        return torch.equal(read.to(dtype).view_as(expected), expected.to(dtype))

    def _written_targets(self, index: Tensor) -> Tensor:
        """Return targets as their owner writes them."""
        return 2 * self.targets[index] - 1 if self.signed else self.targets[index]

    def _read_batch(self, index: Tensor) -> Tensor:
        """Read the inputs (B, …) at some indices (B,) at once; checked as those read one by one."""
        assert isinstance(self.dataset, BatchReader)
        where = [f"{self.label} sample {sample_index}" for sample_index in self.indices[index].tolist()]
        inputs, targets = self.dataset.read_batch(self.indices[index].tolist())
        inputs = as_input(inputs, None, where[0])
        inputs = resize_tensor(inputs, self.size) if self.size is not None and inputs.dim() == 4 else inputs
        if self.expected is not None:
            _check_same_type(inputs[0], self.expected, where[0])
        if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
            for sample, place in zip(inputs, where, strict=True):
                _check_finite(sample, place)
        if not self._are_targets(targets, index):
            for target, position, place in zip(targets, index.tolist(), where, strict=True):
                self._check_target(target, position, place)
        return inputs

    def example(self) -> Tensor:
        """Read the input of the first sample."""
        return self[0]

    def chunks(self) -> Iterator[Tensor]:
        """Read all inputs in order, several at a time."""
        length = 1 if self.expected is None else _chunk_length(self.expected)
        return self.stream(torch.arange(len(self)).split(length))

    def checked(self, example: Tensor, in_memory: bool, statistics: ChannelStatistics | None = None) -> Source:
        """Read every sample once and return this source, or a copy in memory.

        Args:
            example: An input whose shape and dtype all others must have.
            in_memory: Whether to return a copy in memory.
            statistics: The inputs are added to it, so that a stream need not be read again for them.

        Raises:
            DataError: A sample cannot be read, is not finite, or differs from the example in shape or dtype.
        """
        source = replace(self, expected=example)
        inputs = torch.empty((len(self) if in_memory else 0, *example.shape), dtype=example.dtype)
        start, values, repeatable = 0, TensorHash(), True
        for chunk in source.chunks():
            if in_memory:
                inputs[start : start + len(chunk)] = chunk
            else:
                values.add(chunk)
            if statistics is not None:
                statistics.add(chunk)
            if start == 0:
                repeatable = source._gives_again(chunk[:REREAD])
            start += len(chunk)
        if in_memory:
            return TensorSource(inputs, self.indices, self.targets, self.label, repeatable, self.signed)
        return replace(source, inputs_sha256=values.hexdigest if repeatable else None)

    def _gives_again(self, first: Tensor) -> bool:
        """Whether the first samples are the same when they are read once more: random transforms change them."""
        return all(torch.equal(self[index], sample) for index, sample in enumerate(first))

    def stream(self, index_batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Read the inputs batch by batch, each (B, …), for batches of sample indices.

        A data set that is a `BatchReader` is read in threads, ahead of the use; others are read here when they are
        needed, because they may be random or permit one thread only.
        """
        if isinstance(self.dataset, BatchReader):
            example = self.example() if self.expected is None else self.expected
            return read_ahead(self._read_batch, index_batches, example.numel() * example.element_size())
        batches = [index.tolist() for index in index_batches]
        # A loader without a generator would advance torch's global one.
        return iter(DataLoader(self, batch_sampler=batches, collate_fn=torch.stack, generator=torch.Generator()))


Source = TensorSource | MapSource


def make_source(samples: Any, info: DataInfo, size: int | None, label: str) -> Source:
    """Make a source of a pair of tensors (inputs, targets) or of a map-style data set, and check its targets.

    Args:
        samples: The pair or the data set.
        info: Task and number of outputs, which the targets must fit.
        size: Side that images are resized to; None: not at all.
        label: Name of the split for error messages.

    Raises:
        DataError: There are no samples, a target does not fit `info`, or a tensor of inputs is not finite.
    """
    if not isinstance(samples, tuple | list):
        read = read_targets(samples, label)
        targets = check_targets(read, info, label)
        return MapSource(samples, torch.arange(len(targets)), targets, label, size, signed=_signed(read, info))
    inputs, targets = torch.as_tensor(samples[0]).cpu(), as_target(samples[1], label).cpu()
    if len(inputs) != len(targets):
        raise DataError(f"{len(inputs)} inputs, but {len(targets)} targets", label, "provide one target per sample")
    signed = _signed(targets, info)
    targets = check_targets(targets, info, label)
    inputs = inputs if inputs.dtype == torch.uint8 else inputs.to(torch.float32)
    if inputs.dim() == 1:
        inputs = inputs.unsqueeze(1)
    length = _chunk_length(inputs[0])
    if size is not None and inputs.dim() == 4:
        inputs = torch.cat([resize_tensor(chunk, size) for chunk in inputs.split(length)])
    check_finite_samples(inputs, label)
    return TensorSource(inputs, torch.arange(len(targets)), targets, label, signed=signed)


def check_finite_samples(inputs: Tensor, label: str) -> None:
    """Raise a `DataError` that names the first of the samples (N, …) that is not finite."""
    length = _chunk_length(inputs[0])
    for start, chunk in zip(range(0, len(inputs), length), inputs.split(length), strict=True):
        if chunk.is_floating_point() and not bool(chunk.isfinite().all()):
            first = int(chunk.reshape(len(chunk), -1).isfinite().all(1).logical_not().nonzero()[0])
            _check_finite(chunk[first], f"{label} sample {start + first}")


def read_targets(dataset: Any, label: str) -> Tensor:
    """Return the targets of a map-style data set: its attribute `targets`, else read from all samples."""
    targets = getattr(dataset, "targets", None)
    if targets is None:
        locations = [f"{label} sample {index}" for index in range(len(dataset))]
        read = [as_target(read_sample(dataset, i, where)[1], where) for i, where in enumerate(locations)]
        return torch.stack(read) if read else torch.empty(0)
    targets = as_target(targets, f"{label} attribute `targets`")
    if len(targets) != len(dataset):
        what = f"{len(dataset)} samples, but {len(targets)} in the attribute `targets`"
        raise DataError(what, label, "provide one target per sample")
    return targets


def read_sample(dataset: TorchDataset[Any], index: int, where: str) -> tuple[Any, Any]:
    """Read one (input, target) of a map-style data set; a `DataError` names `where` if that fails."""
    try:
        sample = dataset[index]
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", where, "fix or remove it") from error
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(f"expected a pair (input, target), got {type(sample).__name__}", where, "return a pair")
    return sample[0], sample[1]


def as_input(value: Any, size: int | None, where: str) -> Tensor:
    """Convert a tensor, an array, an image or a number to a tensor, uint8 if it is, else float32.

    Images (C, H, W) are resized to `size` if it is not None.
    """
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        # torch.tensor copies: an array that is memory-mapped read-only cannot be shared.
        sample = value if isinstance(value, Tensor) else None
        if sample is None:
            sample = pil_to_tensor(value) if isinstance(value, Image.Image) else torch.tensor(value)
    except (*UNREADABLE, TypeError) as error:
        what = f"expected a tensor, an array, an image or a number, got {type(value).__name__}"
        raise DataError(what, where, f"convert it ({error})") from error
    sample = sample if sample.dtype == torch.uint8 else sample.to(torch.float32)
    if sample.dim() == 0:
        return sample.unsqueeze(0)
    return resize_tensor(sample, size) if size is not None and sample.dim() == 3 else sample


def as_target(value: Any, where: str) -> Tensor:
    """Convert class indices or real numbers to a tensor; Python's own numbers keep all their digits, in float64."""
    try:
        target = torch.as_tensor(value)
        if target.is_floating_point() and isinstance(value, float | list | tuple):
            return torch.as_tensor(value, dtype=torch.float64)
        return target
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"expected a class index or real numbers as the target, got {value!r:.60}"
        raise DataError(what, where, "number the classes from 0") from error


def check_targets(targets: Tensor, info: DataInfo, label: str) -> Tensor:
    """Return targets as int64 class indices (N,) or float64 values (N, C); a `DataError` names the first bad one.

    The classes -1 and +1, as in the formulas of margin losses, become 0 and 1.
    """
    if len(targets) == 0:
        raise DataError("no samples", label, "provide at least one sample")
    return TASKS[info.task].check_targets(targets, info.num_outputs, label)


def _signed(targets: Tensor, info: DataInfo) -> bool:
    return info.task == "classification" and are_signs(targets, info.num_outputs)


def _chunk_length(sample: Tensor) -> int:
    return max(1, CHUNK_BYTES // max(1, sample.numel() * sample.element_size()))


def _check_same_type(sample: Tensor, expected: Tensor, where: str) -> None:
    if sample.shape != expected.shape or sample.dtype != expected.dtype:
        what = f"expected {describe_tensor(expected)} like the first training sample, got {describe_tensor(sample)}"
        raise DataError(what, where, "give all samples the same shape and dtype")


def _check_finite(sample: Tensor, where: str) -> None:
    if sample.is_floating_point() and not bool((finite := sample.isfinite()).all()):
        index = finite.logical_not().nonzero()[0].tolist()
        raise DataError(f"not a finite number: {float(sample[tuple(index)])} at {index}", where, "replace or remove it")
