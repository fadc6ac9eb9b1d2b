"""Resizing of images: the one definition that training and prediction share.

Pillow resizes both files and tensors. Other implementations round differently, so that a network would be trained on
other pixels than those it predicts from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor


def centre_offset(full: int, part: int) -> int:
    """Compute where the centred part of a side starts; of two central positions, the even one."""
    return round((full - part) / 2)


def resize_image(image: Image.Image, size: int) -> Image.Image:
    """Resize an image so that its shorter side is `size` (bilinear, antialiased), and keep the central square."""
    if image.size == (size, size):
        return image
    width, height = (size * side // min(image.size) for side in image.size)
    left, top = centre_offset(width, size), centre_offset(height, size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def resize_tensor(images: Tensor, size: int) -> Tensor:
    """Resize images (…, H, W), uint8 or float32, to (…, size, size), with the same result as `resize_image`."""
    import torch

    if images.shape[-2:] == (size, size):
        return images
    # Pillow resizes channels independently, so each can be resized as a separate grey image.
    channels = images.contiguous().view(-1, *images.shape[-2:]).numpy()
    resized = [np.asarray(resize_image(Image.fromarray(channel), size)) for channel in channels]
    return torch.from_numpy(np.stack(resized)).view(*images.shape[:-2], size, size)
