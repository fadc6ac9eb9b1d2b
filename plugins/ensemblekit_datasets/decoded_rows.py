"""Decoded images in one file on disk: written while images are checked, read row by row in any order.

The file is a safetensors file with one tensor, uint8 (N, C, H, W), that is never in memory as a whole. Rows are read,
not mapped: a file that is cut off or removed in the meantime is then an error that can be handled, and a limit of
address space holds.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self
from zlib import crc32

import numpy as np
from torch import Tensor

from ensemblekit import atomic_write
from ensemblekit_datasets.decoded_cache import mark_used

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARE_OF_DISK = 0.25
"""Decoded images may take this share of the disk's free space."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 2**20

Shape = tuple[int, int, int]


def room_on_disk(folder: Path) -> int:
    """Return how many bytes may be written to a folder: a quarter of the disk's free space; 0 if it is read-only."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return int(SHARE_OF_DISK * shutil.disk_usage(existing).free) if os.access(existing, os.W_OK) else 0


class RowWriter:
    """Writes images one after the other; the file appears, complete, when the block ends without an error.

    A disk that is full or read-only is only a warning: `checksums` is empty then.

    Args:
        path: The file.
        shape: Shape of each image, (channels, height, width).
        most: Largest number of images.
        source: Where the images are from, for `ensemblekit cache`.
    """

    def __init__(self, path: Path, shape: Shape, most: int, source: str) -> None:
        self.path, self.shape, self.source = path, shape, source
        self.room = len(self._header(most))
        self.checksums: list[int] = []
        """The CRC-32 of each row that was written."""
        self._stack, self._file = ExitStack(), None
        self._failure: OSError | None = None

    _file: BinaryIO | None

    def __enter__(self) -> Self:
        with self._noting_failure():
            staged = self._stack.enter_context(atomic_write(self.path))
            self._file = self._stack.enter_context(staged.open("wb"))
            self._file.seek(_LENGTH.size + self.room)
        return self

    def add(self, pixels: NDArray[np.uint8]) -> None:
        """Write the next image, uint8 (channels, height, width)."""
        if self._file is None or self._failure is not None:
            return
        row = np.ascontiguousarray(pixels)
        with self._noting_failure():
            self._file.write(row.data)
        self.checksums.append(crc32(row.data))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._noting_failure():
            if error is None and self._failure is None and self._file is not None:
                self._file.seek(0)
                self._file.write(_LENGTH.pack(self.room) + self._header(len(self.checksums)).ljust(self.room))
        reason = error or self._failure
        try:
            # an exception tells `atomic_write` to remove what was written
            self._stack.__exit__(None if reason is None else type(reason), reason, None)
        except OSError as failure:
            self._failure = failure
        if self._failure is not None:
            self.checksums.clear()
            message = f"decoded images are not kept in {self.path.parent}: {self._failure}"
            fix = "each epoch decodes them again; set ENSEMBLEKIT_DATA to a folder with free space"
            warnings.warn(f"{message}; {fix}", RuntimeWarning, stacklevel=2)

    def _header(self, number: int) -> bytes:
        shape = [number, *self.shape]
        header: dict[str, Any] = {"__metadata__": {"notes": json.dumps({"source": self.source})}}
        header["images"] = {"dtype": "U8", "shape": shape, "data_offsets": [0, prod(shape)]}
        text = json.dumps(header).encode()
        return text.ljust(-(-len(text) // 8) * 8)  # safetensors aligns its data

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failure = error


@dataclass(frozen=True)
class DecodedRows:
    """Rows of such a file that belong to the images of a split."""

    path: Path
    start: int
    """Where the first row of the file begins, in bytes."""
    shape: Shape
    rows: Tensor
    """The row of each image, int64 (N,); -1: it has none."""
    checksums: Tensor
    """The CRC-32 of each image, int64 (N,)."""

    @classmethod
    def open(cls, path: Path, shape: Shape, rows: Tensor, checksums: Tensor) -> Self | None:
        """Open a file; None if there is none, or if it cannot have these rows."""
        try:
            with path.open("rb") as file:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                header = json.loads(file.read(length)) if length <= _MAX_HEADER else {}
            found = header["images"]["shape"]
            start = _LENGTH.size + length
            whole = path.stat().st_size == start + prod(found) and found[1:] == list(shape)
        except (OSError, ValueError, LookupError, TypeError, struct.error):
            return None
        if not whole or (len(rows) and int(rows.max()) >= found[0]):
            return None
        mark_used(path)
        return cls(path, start, shape, rows, checksums)

    def select(self, indices: Tensor) -> Self:
        """Return the rows of some of the images."""
        return replace(self, rows=self.rows[indices], checksums=self.checksums[indices])

    def read(self, indices: Sequence[int], images: NDArray[np.uint8]) -> list[int]:
        """Read the images at some indices into an array (B, C, H, W).

        Returns:
            The positions in the array that were not read: of images without a row or with a wrong checksum, or of all
            of them if the file was removed.
        """
        size = prod(self.shape)
        rows, checksums = self.rows[indices].tolist(), self.checksums[indices].tolist()
        missing = []
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return list(range(len(indices)))
        try:
            for position, (row, checksum) in enumerate(zip(rows, checksums, strict=True)):
                if row < 0 or not _read_row(descriptor, self.start + row * size, images[position], checksum):
                    missing.append(position)
        finally:
            os.close(descriptor)
        return missing


def _read_row(descriptor: int, offset: int, row: NDArray[np.uint8], checksum: int) -> bool:
    try:
        return os.preadv(descriptor, [row.data], offset) == row.nbytes and crc32(row.data) == checksum
    except OSError:  # a bad block
        return False
