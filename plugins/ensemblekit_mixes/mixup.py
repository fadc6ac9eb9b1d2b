"""Mixup: convex combinations of pairs of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import BatchAugmentation
from ensemblekit_mixes.pairs import random_partners, sample_shares

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Mixup(BatchAugmentation):
    """Mixes each sample with another one of its batch, by a random share; for images, tables and any other inputs."""

    paper = "Zhang et al. 2018, mixup: Beyond Empirical Risk Minimization"
    formula = "x = s x_a + (1 - s) x_b,  s ~ Beta(alpha, alpha)"

    alpha: float = Field(0.2, gt=0, description="parameter of the distribution of the shares; 1 is uniform")

    def sample(self, num_samples: int, generator: Generator) -> Tensor:
        """Sample partners and shares, (num_samples, 2)."""
        partners = torch.rand(num_samples, generator=generator)
        return torch.stack([partners, sample_shares(num_samples, self.alpha, generator)], dim=1)

    def apply(self, inputs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        partner, share = random_partners(sampled[:, 0]), sampled[:, 1]
        own = share.view(-1, *[1] * (inputs.ndim - 1))
        return own * inputs + (1 - own) * inputs[partner], partner, share
