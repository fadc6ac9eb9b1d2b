"""Random images for the tests of data."""

from __future__ import annotations

import torch
from torch import Tensor


def random_images(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 1) -> Tensor:
    """Random pixels, the same for the same shape and seed; floating ones are in [0, 1]."""
    images = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return images if dtype == torch.uint8 else images.to(dtype) / 255
