"""Augmentation of whole batches, on whatever device they are; every image has parameters of its own.

The functions are exact: what is random is drawn first, by the `draw_*` functions, from a generator on the CPU.
Images are uint8 or floating, (B, C, H, W), and keep their dtype until `normalise` makes them float32.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional


def crop(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], padding: int = 0) -> Tensor:
    """Cut (B, C, *size) out of images with zeros around them; `top`, `left` (B,) count from the padding's corner."""
    height, width = size
    if padding:
        images = functional.pad(images, (padding, padding, padding, padding))
    images = images.contiguous()
    batch, channels, full_height, full_width = images.shape
    # Every run of `width` pixels that the memory has, as overlapping rows: picking rows copies memory block by block,
    # which is several times faster than indexing pixels.
    runs = images.as_strided((images.numel() - width + 1, width), (1, 1))
    device = images.device
    planes = torch.arange(batch * channels, device=device).view(batch, channels, 1) * (full_height * full_width)
    lines = torch.arange(height, device=device) * full_width
    corners = (top * full_width + left).view(batch, 1, 1)
    return runs.index_select(0, (planes + corners + lines).flatten()).view(batch, channels, height, width)


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle (…, *size) of images (…, H, W) that are at least as large; of two middles the even one."""
    top, left = (round((full - part) / 2) for full, part in zip(images.shape[-2:], size, strict=True))
    return images[..., top : top + size[0], left : left + size[1]]


def flip(images: Tensor, mask: Tensor) -> Tensor:
    """Mirror the images at which `mask` (B,) is true left to right."""
    both = torch.cat([images, images.flip(-1)])
    # picking whole images copies memory; torch.where on a mask that is broadcast is several times slower
    return both.index_select(0, torch.arange(len(images), device=images.device) + len(images) * mask)


def rotate(images: Tensor, angles: Tensor) -> Tensor:
    """Turn each image about its centre, counter-clockwise by `angles` (B,) in degrees; bilinear, zeros outside.

    With angles in float64 it is torchvision's `rotate` without a fill, bit by bit: uint8 images are rounded too.
    """
    batch, _, height, width = images.shape
    dtype = images.dtype if images.is_floating_point() else torch.float32
    device = images.device
    radians = torch.deg2rad(angles)
    cos, sin = torch.cos(radians).to(dtype), torch.sin(radians).to(dtype)
    # where each pixel of the result comes from, in units of half an image with the origin in the centre
    source_x = torch.stack([cos, -sin], dim=-1) / (width / 2)
    source_y = torch.stack([sin, cos], dim=-1) / (height / 2)
    x = torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=device, dtype=dtype)
    y = torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=device, dtype=dtype)
    pixels = torch.cartesian_prod(y, x).flip(-1).expand(batch, -1, -1)
    grid = pixels.bmm(torch.stack([source_x, source_y], dim=-1)).view(batch, height, width, 2)
    turned = functional.grid_sample(images.to(dtype), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned if images.is_floating_point() else turned.round_().to(images.dtype)


def resize(images: Tensor, size: int) -> Tensor:
    """Resize images (…, C, H, W) so that the shorter side is `size` (bilinear, antialiased), and keep the middle."""
    from torchvision.transforms.v2 import functional as torchvision_functional

    return centre_crop(torchvision_functional.resize(images, [size], antialias=True), (size, size))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """float32 images (x - mean) / std, with x scaled to [0, 1] if they are uint8; `mean` and `std` are (C,)."""
    unit = 255 if images.dtype == torch.uint8 else 1
    scale, shift = 1 / (unit * std), -mean / std
    return images.mul(scale[:, None, None]).add_(shift[:, None, None])


def draw_offsets(count: int, largest: int, generator: Generator) -> Tensor:
    """Whole numbers (count,) from 0 to `largest`, all equally likely: the top or left edges of random crops."""
    return torch.randint(largest + 1, (count,), generator=generator)


def draw_flips(count: int, generator: Generator) -> Tensor:
    """True or false (count,), equally likely."""
    return torch.rand(count, generator=generator) < 0.5


def draw_angles(count: int, degrees: float, generator: Generator) -> Tensor:
    """Angles (count,) between -degrees and degrees, all equally likely."""
    return (2 * torch.rand(count, generator=generator) - 1) * degrees
