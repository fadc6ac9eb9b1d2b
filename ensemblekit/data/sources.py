"""Samples as their data set gives them, checked and made tensors: all at once, or one by one as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ensemblekit.core.errors import DataError
from ensemblekit.core.plugin import DataInfo
from ensemblekit.data.augmentation import resize

CHUNK_BYTES = 2**24
UNREADABLE = (OSError, RuntimeError, SyntaxError, ValueError)
"""What decoders raise for files that they cannot read (Pillow: SyntaxError for a broken PNG)."""


@dataclass(frozen=True)
class TensorSource:
    """Samples that are tensors already: inputs (N, …), uint8 or float32, and targets."""

    inputs: Tensor
    targets: Tensor
    label: str

    def __len__(self) -> int:
        return len(self.inputs)

    def select(self, positions: Tensor) -> Self:
        return replace(self, inputs=self.inputs[positions], targets=self.targets[positions])

    def example(self) -> Tensor:
        return self.inputs[0]

    def chunks(self) -> Iterator[Tensor]:
        return iter(self.inputs.split(_chunk_length(self.inputs[0])))

    def checked(self, example: Tensor, in_memory: bool) -> TensorSource:
        """Itself, if its samples have the example's shape; else a `DataError`."""
        _check_like(self.inputs[0], example, f"{self.label} sample 0")
        return self


@dataclass(frozen=True)
class MapSource(TorchDataset[Tensor]):
    """Samples of a map-style data set, read when they are asked for; as a data set it gives the inputs only."""

    dataset: TorchDataset[Any]
    positions: Tensor
    targets: Tensor
    """Of these positions, in this order."""
    label: str
    size: int | None
    like: Tensor | None = None
    """A sample whose shape all must have."""

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, positions: Tensor) -> Self:
        return replace(self, positions=self.positions[positions], targets=self.targets[positions])

    def __getitem__(self, index: int) -> Tensor:
        position = int(self.positions[index])
        where = f"{self.label} sample {position}"
        value, target = read_sample(self.dataset, position, where)
        sample = as_input(value, self.size, where)
        if self.like is not None:
            _check_like(sample, self.like, where)
        _check_finite(sample, where)
        read, expected = as_target(target, where), self.targets[index]
        if not torch.equal(read.to(expected.dtype).view_as(expected), expected):
            what = f"its target is {read.tolist()}, but the data set's attribute `targets` says {expected.tolist()}"
            raise DataError(what, where, "make both say the same")
        return sample

    def example(self) -> Tensor:
        return self[0]

    def chunks(self) -> Iterator[Tensor]:
        length = 1 if self.like is None else _chunk_length(self.like)
        return self.stream(torch.arange(len(self)).split(length))

    def checked(self, example: Tensor, in_memory: bool) -> Source:
        """Itself or a copy in memory, every sample read once; a `DataError` if one is not like the example."""
        source = replace(self, like=example)
        inputs = torch.empty((len(self) if in_memory else 0, *example.shape), dtype=example.dtype)
        start = 0
        for chunk in source.chunks():
            if in_memory:
                inputs[start : start + len(chunk)] = chunk
            start += len(chunk)
        return TensorSource(inputs, self.targets, self.label) if in_memory else source

    def stream(self, index_batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The inputs of one batch of samples after the other."""
        batches = [index.tolist() for index in index_batches]
        # a generator of its own, because a loader without one draws from torch's global one
        return iter(DataLoader(self, batch_sampler=batches, collate_fn=torch.stack, generator=torch.Generator()))


Source = TensorSource | MapSource


def make_source(given: Any, info: DataInfo, size: int | None, label: str) -> Source:
    """Samples that can be picked from, their targets checked; `given` is a pair of tensors or a map-style data set."""
    if not isinstance(given, tuple | list):
        targets = check_targets(read_targets(given, label), info, label)
        return MapSource(given, torch.arange(len(targets)), targets, label, size)
    inputs, targets = (torch.as_tensor(part).cpu() for part in given)
    if len(inputs) != len(targets):
        raise DataError(f"{len(inputs)} inputs, but {len(targets)} targets", label, "give each sample one target")
    targets = check_targets(targets, info, label)
    inputs = inputs if inputs.dtype == torch.uint8 else inputs.to(torch.float32)
    if inputs.dim() == 1:
        inputs = inputs.unsqueeze(1)
    length = _chunk_length(inputs[0])
    if size is not None and inputs.dim() == 4:
        inputs = torch.cat([resize(chunk, size) for chunk in inputs.split(length)])
    for start, chunk in zip(range(0, len(inputs), length), inputs.split(length), strict=True):
        if chunk.is_floating_point() and not bool(chunk.isfinite().all()):
            bad = int(chunk.flatten(1).isfinite().all(1).logical_not().nonzero()[0])
            _check_finite(chunk[bad], f"{label} sample {start + bad}")
    return TensorSource(inputs, targets, label)


def read_targets(dataset: Any, label: str) -> Tensor:
    """The targets of a map-style data set: its attribute `targets`, or else those of all samples, which are read."""
    given = getattr(dataset, "targets", None)
    if given is None:
        wheres = [f"{label} sample {position}" for position in range(len(dataset))]
        read = [as_target(read_sample(dataset, i, where)[1], where) for i, where in enumerate(wheres)]
        return torch.stack(read) if read else torch.empty(0)
    targets = as_target(given, f"{label} attribute `targets`")
    if len(targets) != len(dataset):
        what = f"{len(dataset)} samples, but its attribute `targets` has {len(targets)}"
        raise DataError(what, label, "give each sample one target")
    return targets


def read_sample(dataset: TorchDataset[Any], position: int, where: str) -> tuple[Any, Any]:
    """One (input, target) of a map-style data set, or a `DataError` that says which cannot be read."""
    try:
        sample = dataset[position]
    except UNREADABLE as error:
        raise DataError(f"cannot be read: {error}", where, "mend or remove it") from error
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(f"expected a pair (input, target), got {type(sample).__name__}", where, "return a pair")
    return sample[0], sample[1]


def as_input(value: Any, size: int | None, where: str) -> Tensor:
    """A tensor, an array, an image or a number as a tensor: uint8 if it is, float32 else; images resized to `size`."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        # torch.tensor copies: an array that is mapped read-only cannot be shared
        sample = value if isinstance(value, Tensor) else None
        if sample is None:
            sample = pil_to_tensor(value) if isinstance(value, Image.Image) else torch.tensor(value)
    except (*UNREADABLE, TypeError) as error:
        what = f"expected a tensor, an array, an image or a number, got {type(value).__name__}"
        raise DataError(what, where, f"convert it ({error})") from error
    sample = sample if sample.dtype == torch.uint8 else sample.to(torch.float32)
    if sample.dim() == 0:
        return sample.unsqueeze(0)
    return resize(sample, size) if size is not None and sample.dim() == 3 else sample


def as_target(value: Any, where: str) -> Tensor:
    """A class index, a number or several, as a tensor."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"expected a class index or real numbers as its target, got {value!r:.60}"
        raise DataError(what, where, "number the classes from 0") from error


def check_targets(targets: Tensor, info: DataInfo, label: str) -> Tensor:
    """Class indices as int64 (N,) or real values as float32 (N, C), or a `DataError` that names the first bad one."""
    if len(targets) == 0:
        raise DataError("it is empty", label, "give at least one sample")
    if info.task == "regression":
        values = targets.to(torch.float32)
        values = values.unsqueeze(1) if values.dim() == 1 else values
        if values.shape[1:] != (info.num_outputs,):
            what = f"expected {info.num_outputs} real values per sample, got shape {tuple(values.shape[1:])}"
            raise DataError(what, label)
        bad = values.isfinite().all(1).logical_not().nonzero()
        if len(bad):
            where = f"{label} sample {int(bad[0])}"
            raise DataError(f"its target is not finite: {values[bad[0, 0]].tolist()}", where, "remove it")
        return values
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        got = f"{str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape[1:])}"
        raise DataError(f"expected one class index per sample, got {got}", label, "number the classes from 0")
    classes = targets.to(torch.int64)
    # one output is enough for two classes: the losses of ±1
    num_classes = max(2, info.num_outputs)
    bad = ((classes < 0) | (classes >= num_classes)).nonzero()
    if len(bad):
        what = f"expected class indices from 0 to {num_classes - 1}, got {int(classes[bad[0, 0]])}"
        raise DataError(what, f"{label} sample {int(bad[0])}", "number the classes from 0")
    return classes


def channel_statistics(chunks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation (C,) of each channel of images (N, C, H, W), uint8 scaled to [0, 1]; float64."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for images in chunks:
        values = images.to(torch.float64) / (255 if images.dtype == torch.uint8 else 1)
        count += values.numel() // values.shape[1]
        total = total + values.sum(dim=(0, 2, 3))
        squares = squares + values.square().sum(dim=(0, 2, 3))
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0).sqrt()


def _chunk_length(sample: Tensor) -> int:
    return max(1, CHUNK_BYTES // max(1, sample.numel() * sample.element_size()))


def _check_like(sample: Tensor, example: Tensor, where: str) -> None:
    if sample.shape != example.shape or sample.dtype != example.dtype:
        expected, got = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (example, sample))
        raise DataError(f"expected {expected} as the first training sample is, got {got}", where, "make them alike")


def _check_finite(sample: Tensor, where: str) -> None:
    if sample.is_floating_point() and not bool((finite := sample.isfinite()).all()):
        place = finite.logical_not().nonzero()[0].tolist()
        raise DataError(f"not a finite number: {float(sample[tuple(place)])} at {place}", where, "replace or remove it")
