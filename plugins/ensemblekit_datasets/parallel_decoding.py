"""Decoding of many images in threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ensemblekit import Decoding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
IMAGES_PER_TASK = 64
"""Passing single small images to a thread costs more than decoding them."""


def decode_all(files: Iterator[tuple[str, bytes]], decoding: Decoding, folder: Path) -> Iterator[tuple[str, Pixels]]:
    """Decode (name, content) pairs in threads, in their order; only a few hundred are in memory at a time."""

    def task(batch: list[tuple[str, bytes]]) -> list[tuple[str, Pixels]]:
        return [(name, decoding(data, f"{folder}/{name}")) for name, data in batch]

    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[list[tuple[str, Pixels]]]] = deque()
        while batch := list(islice(files, IMAGES_PER_TASK)):
            running.append(pool.submit(task, batch))
            if len(running) > 2 * workers:
                yield from running.popleft().result()
        for future in running:
            yield from future.result()
