"""From the bytes of an image file to a uint8 array."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from ensemblekit.core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


@dataclass(frozen=True)
class Decoding:
    """How image files become arrays of one shape."""

    size: int | None
    """The side of the square that an image is resized and cut to; None: as it is."""
    channels: Literal[1, 3]

    def __call__(self, data: bytes, place: str) -> NDArray[np.uint8]:
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


def _reason(error: Exception) -> str:
    return "not such an image" if isinstance(error, UnidentifiedImageError) else str(error)
