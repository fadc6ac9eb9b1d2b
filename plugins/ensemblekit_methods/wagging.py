"""Wagging: bagging with continuous sample weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Method, hookimpl

if TYPE_CHECKING:
    from torch import Generator, Tensor

DEFAULT_SIGMA = 1.0


class Wagging(Method):
    """Trains every member with its own random continuous sample weights, sampled once per run."""

    paper = (
        "Bauer and Kohavi 1999, An Empirical Comparison of Voting Classification Algorithms; Webb 2000, MultiBoosting"
    )
    formula = "(1/M) sum_i w_ni l(h_i, y)"

    weights: Literal["exponential", "gaussian"] = Field(
        "exponential", description="exponential with mean 1 (a continuous Poisson(1)); 1 + sigma N(0, 1), clipped at 0"
    )
    sigma: float | None = Field(
        None, gt=0, description=f'standard deviation of "gaussian" before clipping (default {DEFAULT_SIGMA})'
    )

    @field_validator("sigma")
    @classmethod
    def _sigma_is_used(cls, sigma: float | None, info: ValidationInfo) -> float | None:
        if sigma is not None and info.data.get("weights") != "gaussian":
            raise ValueError('is only used with weights = "gaussian": set that, or remove it')
        return sigma

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int, generator: Generator) -> Tensor:
        return torch.stack([self._member_weights(num_samples, generator) for _ in range(num_members)], dim=1)

    def _member_weights(self, num_samples: int, generator: Generator) -> Tensor:
        if self.weights == "exponential":
            return torch.empty(num_samples).exponential_(generator=generator)
        noise = torch.randn(num_samples, generator=generator)
        return (1 + (self.sigma or DEFAULT_SIGMA) * noise).clamp_min(0)
