"""Random pairs of samples and the shares in which they are mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Generator, Tensor


def sample_shares(num_samples: int, alpha: float, generator: Generator) -> Tensor:
    """Sample shares from Beta(alpha, alpha), float32 (num_samples,)."""
    # torch samples this distribution from its global generator only
    seed = int(torch.randint(2**63 - 1, (1,), generator=generator))
    return torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, num_samples)).float()


def random_partners(uniform: Tensor) -> Tensor:
    """Return a random permutation of a batch, int64 (B,), from a random number for each sample (B,)."""
    return uniform.argsort(stable=True)
