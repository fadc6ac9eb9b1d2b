"""From the bytes of an image file to a uint8 array, one image or many at once."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from torchvision.transforms.v2 import functional as transforms

from ensemblekit import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Pixels = NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
IMAGES_PER_TASK = 64
"""Handing single small images to a thread costs more than decoding them."""


@dataclass(frozen=True)
class Decoding:
    """How image files become arrays of one shape."""

    size: int | None
    channels: Literal[1, 3]

    def __call__(self, data: bytes, place: str) -> Pixels:
        """The image of a file's bytes: uint8 (channels, height, width); `place` is what errors call the file."""
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.mode.startswith(("I", "F")):
                    raise DataError("image has more than 8 bits a channel", place, "convert it to 8 bits")
                converted = image.convert("RGB" if self.channels == 3 else "L")
        except (DataError, MemoryError):
            raise
        except Exception as error:  # on bad bytes, Pillow's decoders raise nearly anything
            reason = f"expected PNG, JPEG, WebP or BMP, got {len(data)} bytes: {_reason(error)}"
            raise DataError("cannot decode image", place, f"{reason}; replace or remove the file") from error
        pixels = np.asarray(self._fitted(converted))
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)

    def _fitted(self, image: Image.Image) -> Image.Image:
        """Resized so that the shorter side is `size`, then cut to a centred square."""
        if self.size is None or image.size == (self.size, self.size):
            return image
        width, height = (self.size * side // min(image.size) for side in image.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return resized.crop((left, top, left + self.size, top + self.size))


def decode_all(files: Iterator[tuple[str, bytes]], decoding: Decoding, folder: Path) -> Iterator[tuple[str, Pixels]]:
    """Decode (name, bytes) pairs in threads, in their order; only a few hundred are in memory at a time."""

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


def resize_batch(images: Tensor, size: int | None) -> Tensor:
    """The same for square images that are tensors already: uint8 (N, C, side, side) → (N, C, size, size)."""
    return images if size in (None, images.shape[-1]) else transforms.resize(images, [size, size], antialias=True)


def _reason(error: Exception) -> str:
    return "not such an image" if isinstance(error, UnidentifiedImageError) else str(error)
