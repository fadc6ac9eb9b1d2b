"""Standard corruptions of images, each in five severities, after Hendrycks and Dietterich 2019.

All take images (B, C, H, W) in [0, 1], float32, and return such images. Parameters are those of the authors' code for
CIFAR-10-C (images of up to 64 pixels) and ImageNet-C (larger ones).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

MAX_SMALL_SIDE = 64
"""Images whose shorter side is longer get the parameters for large images."""
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Corruption:
    """A corruption and its parameter for each severity."""

    apply: Callable[[Tensor, float, Generator], Tensor]
    small: tuple[float, ...]
    """Parameters for small images, for the severities 1 to 5."""
    large: tuple[float, ...]
    """Parameters for large images."""
    parameter: str
    """What the parameter is."""

    def __call__(self, images: Tensor, severity: int, random: Generator) -> Tensor:
        """Corrupt images (B, C, H, W) in [0, 1].

        Args:
            images: float32.
            severity: 1 to 5.
            random: on the CPU; corruptions without randomness do not use it.
        """
        values = self.small if min(images.shape[-2:]) <= MAX_SMALL_SIDE else self.large
        return self.apply(images, values[severity - 1], random).clamp(0, 1)


def _gaussian_noise(images: Tensor, deviation: float, random: Generator) -> Tensor:
    return images + deviation * torch.randn(images.shape, generator=random)


def _shot_noise(images: Tensor, photons: float, random: Generator) -> Tensor:
    return torch.poisson(images * photons, generator=random) / photons


def _impulse_noise(images: Tensor, share: float, random: Generator) -> Tensor:
    uniform = torch.rand(images.shape, generator=random)
    salted = torch.where(uniform < share / 2, 0.0, images)
    return torch.where(uniform > 1 - share / 2, 1.0, salted)


def _gaussian_blur(images: Tensor, deviation: float, random: Generator) -> Tensor:
    rows, columns = (_blur_matrix(size, deviation) for size in images.shape[-2:])
    return rows @ images @ columns.T


def _blur_matrix(size: int, deviation: float) -> Tensor:
    """Weights (size, size) of a Gaussian of up to four deviations; pixels outside are those at the edge."""
    radius = int(4 * deviation + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = (-offsets.double().square() / (2 * deviation**2)).exp()
    weights /= weights.sum()
    pixels = torch.arange(size)
    neighbours = (pixels[:, None] + offsets).clamp(0, size - 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add(1, neighbours, weights.expand(size, -1)).float()


def _brightness(images: Tensor, increase: float, random: Generator) -> Tensor:
    """Add to the value of HSV, the largest channel; hue and saturation stay."""
    value = images.amax(dim=1, keepdim=True)
    brighter = (value + increase).clamp(max=1)
    return torch.where(value > 0, images * brighter / value.clamp_min(1e-12), brighter)


def _contrast(images: Tensor, factor: float, random: Generator) -> Tensor:
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + factor * (images - mean)


def _pixelate(images: Tensor, factor: float, random: Generator) -> Tensor:
    rows, columns = (_pixel_matrix(size, max(int(size * factor), 1)) for size in images.shape[-2:])
    return rows @ images @ columns.T


def _pixel_matrix(size: int, blocks: int) -> Tensor:
    """Weights (size, size) that average the pixels of each of so many blocks and give each pixel its block's mean."""
    length = size / blocks
    starts, centres = length * torch.arange(blocks)[:, None].double(), torch.arange(size).double() + 0.5
    # as Pillow's box filter: a pixel belongs to the block that its centre is in, and counts fully
    is_inside = ((centres > starts) & (centres <= starts + length)).double()
    means = is_inside / is_inside.sum(dim=1, keepdim=True)
    return means[(centres / length).long()].float()


def _jpeg(images: Tensor, quality: float, random: Generator) -> Tensor:
    channels = images.shape[1]
    # three channels are compressed as colours; any other number as grey images, one for each channel
    planes = images.flatten(0, 1).unsqueeze(1) if channels != 3 else images
    pixels = (planes * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    decoded = np.stack([_through_jpeg(image, int(quality)) for image in pixels])
    restored = torch.from_numpy(decoded).permute(0, 3, 1, 2).float() / 255
    return restored.reshape(images.shape)


def _through_jpeg(image: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    """Compress pixels (H, W, 1 or 3) and decompress them."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).reshape(image.shape)


CORRUPTIONS = {
    "gaussian_noise": Corruption(
        _gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.1), (0.08, 0.12, 0.18, 0.26, 0.38), "standard deviation"
    ),
    "shot_noise": Corruption(_shot_noise, (500, 250, 100, 75, 50), (60, 25, 12, 5, 3), "photons of a white pixel"),
    "impulse_noise": Corruption(
        _impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27), "share of black or white values"
    ),
    "gaussian_blur": Corruption(
        _gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1), (1, 2, 3, 4, 6), "standard deviation in pixels"
    ),
    "brightness": Corruption(
        _brightness, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5), "addition to the value of HSV"
    ),
    "contrast": Corruption(
        _contrast, (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05), "factor of the distance from the mean"
    ),
    "pixelate": Corruption(
        _pixelate, (0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25), "factor of the resolution"
    ),
    "jpeg": Corruption(_jpeg, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7), "quality"),
}
"""All corruptions by name."""
