"""Decoding of image files to uint8 arrays, with limits that hold before anything large is allocated."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from ensemblekit.core.errors import DataError
from ensemblekit.core.memory import fits_in_memory
from ensemblekit.data.resizing import resize_image
from ensemblekit.data.sixteen_bits import is_sixteen_bit, to_eight_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PIXELS = 89_478_485
"""Largest number of pixels of an image: where Pillow begins to suspect an attack (a GiB with 12 bytes per pixel)."""
WORKING_BYTES = {8: 12, 16: 24}
"""Memory for decoding a pixel of 8 or 16 bits: Pillow's image, a converted copy and arrays."""
ALWAYS_ALLOWED_BYTES = 2**26
"""Images that need no more memory than this are not compared with the memory of the machine."""


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

        Values of 16 bits are scaled to 8 and rounded: 65535 becomes 255, so v becomes round(v / 257).

        Args:
            data: Content of a PNG, JPEG, WebP or BMP file.
            path: Path of the file, for error messages.

        Returns:
            The pixels, uint8 (channels, height, width).

        Raises:
            DataError: The content is not such an image, is damaged, or has too many pixels.
        """
        return self.open(data, path).decode()

    def open(self, data: bytes, path: str) -> EncodedImage:
        """Read the header of an image, without decoding its pixels.

        Raises:
            DataError: The content is not such an image, or it has too many pixels.
        """
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except MemoryError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(f"too many pixels: {error}", path, _SMALLER) from error
        except Exception as error:  # Pillow's decoders raise nearly anything for invalid bytes
            raise _undecodable(error, data, path) from error
        encoded = EncodedImage(image, data, path, self)
        num_pixels = image.width * image.height
        if num_pixels > MAX_PIXELS:
            what = f"too many pixels: {image.width}×{image.height} is {num_pixels:,}, but at most {MAX_PIXELS:,} are"
            raise DataError(f"{what} allowed", path, _SMALLER)
        if encoded.working_bytes > ALWAYS_ALLOWED_BYTES and not fits_in_memory(encoded.working_bytes):
            what = (
                f"too many pixels: decoding {image.width}×{image.height} takes {encoded.working_bytes / 2**20:.0f} MiB"
            )
            raise DataError(f"{what}, more than a quarter of the memory", path, _SMALLER)
        return encoded


@dataclass(frozen=True)
class EncodedImage:
    """An image file whose header was read."""

    image: Image.Image
    data: bytes
    path: str
    decoding: Decoding

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the decoded pixels: (channels, height, width)."""
        size = self.decoding.size
        return (self.decoding.channels, size or self.image.height, size or self.image.width)

    @property
    def working_bytes(self) -> int:
        """The memory that decoding takes at most, without the file itself."""
        return self.image.width * self.image.height * WORKING_BYTES[16 if is_sixteen_bit(self.data) else 8]

    def decode(self) -> NDArray[np.uint8]:
        """Decode the pixels, uint8 (channels, height, width).

        Raises:
            DataError: The content is damaged, or it is a 16-bit image of a kind that cannot be converted.
        """
        mode = "RGB" if self.decoding.channels == 3 else "L"
        try:
            with self.image:
                image = to_eight_bits(self.image, self.data, self.path) if is_sixteen_bit(self.data) else self.image
                image.load()
                image = image if image.mode == mode else image.convert(mode)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # as in `Decoding.open`
            raise _undecodable(error, self.data, self.path) from error
        size = self.decoding.size
        pixels = np.asarray(image if size is None else resize_image(image, size))
        return pixels[None] if self.decoding.channels == 1 else pixels.transpose(2, 0, 1)


_SMALLER = "make the image smaller"


def _undecodable(error: Exception, data: bytes, path: str) -> DataError:
    reason = "unknown format" if isinstance(error, UnidentifiedImageError) else str(error)
    expected = f"expected PNG, JPEG, WebP or BMP, got {len(data)} bytes: {reason}"
    return DataError("cannot decode image", path, f"{expected}; replace or remove the file")
