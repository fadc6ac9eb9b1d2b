"""Decoding of many images in threads, with a limit on the memory that they take together."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from ensemblekit import DataError, Decoding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

IMAGES_PER_TASK = 64
"""Passing single small images to a thread costs more than decoding them."""
BYTES_PER_TASK = 2**22
"""Tasks of large images are shorter: this limits their files and, separately, their decoded pixels."""
BYTES_IN_FLIGHT = 2**26
"""Files and decoded images that wait to be used; a single one may be larger."""
WORKING_BYTES = 2**28
"""Memory of all threads for decoding; a single image may take more."""

File = tuple[str, bytes | DataError]


class WrongSize(DataError):
    """An image has another size than the others."""


def decode_all(
    files: Iterable[File], decoding: Decoding, folder: Path, shape: tuple[int, ...]
) -> Iterator[tuple[str, Pixels | DataError]]:
    """Decode (name, content) pairs in threads, in their order.

    Args:
        files: The files; an error instead of a content is passed on.
        decoding: Size and channels of the decoded images.
        folder: The folder that names are relative to, for error messages.
        shape: Shape that the decoded images must have; others are not decoded.

    Yields:
        The name and the pixels, or the reason why there are none. Whatever the number of images and of threads, only
        about `BYTES_IN_FLIGHT` of them and `WORKING_BYTES` for decoding are in memory at a time.
    """
    working = _Budget(WORKING_BYTES)
    image_bytes = max(1, shape[0] * shape[1] * shape[2])

    def task(batch: list[File]) -> list[tuple[str, Pixels | DataError]]:
        return [(name, _decoded(content, f"{folder}/{name}", decoding, shape, working)) for name, content in batch]

    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        running: deque[tuple[Future[list[tuple[str, Pixels | DataError]]], int]] = deque()
        in_flight = 0
        for batch, num_bytes in _batches(files, image_bytes):
            running.append((pool.submit(task, batch), num_bytes))
            in_flight += num_bytes
            del batch
            while running and (len(running) > 2 * workers or in_flight > BYTES_IN_FLIGHT):
                future, num_bytes = running.popleft()
                yield from future.result()
                in_flight -= num_bytes
                del future
        while running:
            yield from running.popleft()[0].result()


def _batches(files: Iterable[File], image_bytes: int) -> Iterator[tuple[list[File], int]]:
    """Group files into tasks, each with the bytes of its files and of its decoded images."""
    max_images = min(IMAGES_PER_TASK, max(1, BYTES_PER_TASK // image_bytes))
    batch: list[File] = []
    num_bytes = 0
    for name, content in files:
        batch.append((name, content))
        num_bytes += 0 if isinstance(content, DataError) else len(content)
        if len(batch) == max_images or num_bytes >= BYTES_PER_TASK:
            yield batch, num_bytes + len(batch) * image_bytes
            batch, num_bytes = [], 0
    if batch:
        yield batch, num_bytes + len(batch) * image_bytes


def _decoded(
    content: bytes | DataError, path: str, decoding: Decoding, shape: tuple[int, ...], working: _Budget
) -> Pixels | DataError:
    if isinstance(content, DataError):
        return content
    try:
        image = decoding.open(content, path)
        if image.shape != shape:
            expected, got = ("×".join(map(str, size)) for size in (shape, image.shape))
            what = f"image sizes differ: expected {expected} like the first, got {got}"
            return WrongSize(what, path, "set data.size to resize all")
        with working.taken(image.working_bytes):
            return image.decode()
    except DataError as error:
        return DataError(error.what, error.where, error.fix)  # the frames of the first would keep the content


class _Budget:
    """Bytes that threads share: each waits until what it needs is free, or until nobody else uses any."""

    def __init__(self, num_bytes: int) -> None:
        self._free = self._all = num_bytes
        self._changed = Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: num_bytes <= self._free or self._free == self._all)
            self._free -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free += num_bytes
                self._changed.notify_all()
