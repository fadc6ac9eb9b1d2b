"""Decoding of image files to uint8 arrays."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from ensemblekit.core.errors import DataError
from ensemblekit.data.resizing import resize_image

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


@dataclass(frozen=True)
class Decoding:
    """A way to turn image files into arrays of one shape, the same for training and for predictions.

    Args:
        size: Side in pixels of the square that an image is resized and centre-cropped to; None: keep its size.
        channels: 3 to convert every image to RGB, 1 to grey.
    """

    size: int | None
    channels: Literal[1, 3]

    def __call__(self, data: bytes, path: str) -> NDArray[np.uint8]:
        """Decode an image.

        Args:
            data: Content of a PNG, JPEG, WebP or BMP file.
            path: Path of the file, for error messages.

        Returns:
            The pixels, uint8 (channels, height, width).

        Raises:
            DataError: The content is not such an image, is damaged, or has more than 8 bits per channel.
        """
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.mode.startswith(("I", "F")):
                    raise DataError("image has more than 8 bits per channel", path, "convert it to 8 bits")
                converted = image.convert("RGB" if self.channels == 3 else "L")
        except (DataError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise nearly anything for invalid bytes
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else str(error)
            expected = f"expected PNG, JPEG, WebP or BMP, got {len(data)} bytes: {reason}"
            raise DataError("cannot decode image", path, f"{expected}; replace or remove the file") from error
        pixels = np.asarray(converted if self.size is None else resize_image(converted, self.size))
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)
