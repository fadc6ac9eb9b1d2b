"""Images in a column of an Arrow table: decoded into memory in threads, or one at a time when they are needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from copy import copy
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ensemblekit import DataError, Decoding, fits_in_memory
from ensemblekit_datasets.arrow_splits import StoredSplit
from ensemblekit_datasets.bad_images import BadImages
from ensemblekit_datasets.folder_loading import check_memory
from ensemblekit_datasets.image_sources import MAX_FILE_BYTES
from ensemblekit_datasets.parallel_decoding import WrongSize, decode_all

Shape = tuple[int, int, int]
Images = tuple[Tensor, Tensor] | Dataset[tuple[Tensor, int]]


class StreamedRows(Dataset[tuple[Tensor, Any]]):
    """Images that are decoded on demand: (uint8 (C, H, W), target)."""

    def __init__(self, split: StoredSplit, column: str, targets: Tensor, decoding: Decoding, shape: Shape) -> None:
        self.split, self.targets, self.decoding, self.shape = split, targets, decoding, shape
        self.rows = torch.arange(len(targets))
        self.chunks = split.column(column).chunks
        self.ends = list(accumulate(len(chunk) for chunk in self.chunks))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        row = int(self.rows[index])
        chunk = bisect_right(self.ends, row)
        scalar = self.chunks[chunk][row - (self.ends[chunk] - len(self.chunks[chunk]))]
        content = _content(scalar, self.split, row)
        if isinstance(content, DataError):
            raise content
        image = self.decoding.open(content, self.split.where(row))
        if image.shape != self.shape:
            raise _wrong_size(self.shape, image.shape, self.split.where(row))
        return torch.tensor(image.decode()), self.targets[index]

    def subset(self, indices: Tensor) -> StreamedRows:
        """Return the images at some indices."""
        part = copy(self)
        part.rows, part.targets = self.rows[indices], self.targets[indices]
        return part


def first_shape(split: StoredSplit, column: str, decoding: Decoding) -> Shape:
    """Return the shape of the first image, which all others must have."""
    for name, content in _files(split, column):
        if isinstance(content, DataError):
            raise content
        return decoding.open(content, f"{split.folder}, {name}").shape
    raise DataError("no rows", f'{split.folder}, split "{split.name}"', "use a split with rows")


def use_memory(storage: str, num_images: int, shape: Shape, folder: Path) -> bool:
    """Whether to decode all images into memory; a `DataError` if they are to be, but take more than there is."""
    num_bytes = num_images * prod(shape)
    if storage == "memory":
        check_memory(num_bytes, folder)
    return storage == "memory" or (storage == "auto" and fits_in_memory(num_bytes))


def decode_split(split: StoredSplit, column: str, num_rows: int, decoding: Decoding, shape: Shape) -> Tensor:
    """Decode the images of a split, uint8 (N, C, H, W); a `DataError` lists all that cannot be used."""
    images = torch.empty((num_rows, *shape), dtype=torch.uint8)
    bad = BadImages(split.folder, num_rows)
    decoded = decode_all(_files(split, column), decoding, split.folder, shape)
    for row, (name, pixels) in enumerate(decoded):
        if isinstance(pixels, DataError):
            bad.add(name, pixels)
        else:
            images[row] = torch.from_numpy(pixels.copy())
    bad.raise_unless_skipped(None)
    return images


def _files(split: StoredSplit, column: str) -> Iterator[tuple[str, bytes | DataError]]:
    row = 0
    for array in split.batches(column):
        for scalar in array:
            yield split.row_name(row), _content(scalar, split, row)
            row += 1


def _content(scalar: Any, split: StoredSplit, row: int) -> bytes | DataError:
    """Return the content of an image file; a path beside it is never followed, because the data set is not trusted."""
    value = scalar.as_py()
    path = value.get("path") if isinstance(value, dict) else None
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        what = f"the image is not in the data set, only its path {path!r:.80}" if path else "there is no image"
        return DataError(what, split.where(row), "store images themselves, as `save_to_disk` does, or remove the row")
    if len(content) > MAX_FILE_BYTES:
        what = f"the image takes more than {MAX_FILE_BYTES // 2**20} MiB"
        return DataError(what, split.where(row), "make the image smaller or remove the row")
    return content


def _wrong_size(expected: Shape, got: Shape, where: str) -> WrongSize:
    sizes = ["×".join(map(str, shape)) for shape in (expected, got)]
    what = f"image sizes differ: expected {sizes[0]} like the first, got {sizes[1]}"
    return WrongSize(what, where, "set data.size to resize all")
