"""Explicit randomness: every generator is derived from the run's seed and its purpose."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Derive a 63-bit seed for one purpose, such as ``derive_seed(0, "member", 3)``, independent of all other seeds."""
    text = "/".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def generator(seed: int, *purpose: str | int) -> Generator:
    """Return a CPU generator for one purpose; sample on the CPU and move the result, so that all devices agree."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *purpose))
