"""Randomness is explicit: every generator is derived from the run's seed and what it is for."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, such as ``derive_seed(0, "member", 3)``; unrelated to any other purpose's."""
    text = "/".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def generator(seed: int, *purpose: str | int) -> Generator:
    """A CPU generator for one purpose; draw on the CPU and move the result, so that devices agree."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *purpose))
