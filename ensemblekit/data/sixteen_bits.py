"""PNG files with 16 bits per channel, which Pillow would cut to their upper 8 bits: here they are rounded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ensemblekit.core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY_WITH_ALPHA = 4
"""Colour type in a PNG's header."""


def is_sixteen_bit(data: bytes) -> bool:
    """Return whether a file is a PNG with 16 bits per channel, by its header."""
    return data[:8] == _SIGNATURE and data[12:16] == b"IHDR" and data[24:25] == b"\x10"


def to_eight_bits(image: Image.Image, data: bytes, path: str) -> Image.Image:
    """Convert a 16-bit PNG to 8 bits: a value v becomes round(v / 257), so that 65535 becomes 255.

    Args:
        image: The file, opened by Pillow but not loaded.
        data: Its content.
        path: Its path, for error messages.

    Raises:
        DataError: It has grey and alpha channels, of which Pillow cannot read all bits.
    """
    if image.mode.startswith("I"):  # grey, which Pillow reads in full
        values = np.asarray(image)
        return Image.fromarray(_rounded((values >> 8).astype(np.uint8), (values & 255).astype(np.uint8)))
    if data[25] == _GREY_WITH_ALPHA:
        what = "a 16-bit image with grey and alpha channels cannot be converted to 8 bits"
        raise DataError(what, path, "save it with 8 bits per channel or without transparency")
    high = np.asarray(image)
    with Image.open(io.BytesIO(data), formats=("PNG",)) as low:
        # Pillow keeps the upper byte of each value; told that the bytes are swapped, it keeps the lower one.
        tile: tuple[Any, ...]
        [tile] = low.tile
        low.tile = [(*tile[:3], f"{image.mode};16L")]  # type: ignore[list-item]  # a named tuple since Pillow 11
        return Image.fromarray(_rounded(high, np.asarray(low)))


def _rounded(high: NDArray[np.uint8], low: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Compute round(v / 257) of v = 256 high + low = 257 high + (low - high)."""
    difference = low.astype(np.int16) - high
    return high + (difference > 128).astype(np.uint8) - (difference < -128).astype(np.uint8)
