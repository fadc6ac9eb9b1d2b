"""Bagging: every member is trained on its own resampling of the training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from ensemblekit import Method, hookimpl

if TYPE_CHECKING:
    from torch import Generator, Tensor

DEFAULT_FRACTION = 0.632  # expected share of distinct samples in a bootstrap sample, 1 - 1/e


class Bagging(Method):
    """Trains every member on its own random resampling of the training data, sampled once per run."""

    paper = "Breiman 1996, Bagging Predictors; Oza and Russell 2001, Online Bagging and Boosting (poisson)"
    formula = "(1/M) sum_i w_ni l(h_i, y)"

    weights: Literal["poisson", "bootstrap", "subsample"] = Field(
        "poisson",
        description="Poisson(1) counts; counts of N samples with replacement; a fraction without replacement (0 or 1)",
    )
    fraction: float | None = Field(
        None, gt=0, le=1, description=f'share of the data for "subsample" (default {DEFAULT_FRACTION})'
    )

    @field_validator("fraction")
    @classmethod
    def _fraction_is_used(cls, fraction: float | None, info: ValidationInfo) -> float | None:
        if fraction is not None and info.data.get("weights") != "subsample":
            raise ValueError('is only used with weights = "subsample": set that, or remove it')
        return fraction

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int, generator: Generator) -> Tensor:
        return torch.stack([self._member_weights(num_samples, generator) for _ in range(num_members)], dim=1)

    def _member_weights(self, num_samples: int, generator: Generator) -> Tensor:
        if self.weights == "poisson":
            return torch.poisson(torch.ones(num_samples), generator=generator)
        if self.weights == "bootstrap":
            indices = torch.randint(num_samples, (num_samples,), generator=generator)
            return torch.bincount(indices, minlength=num_samples).float()
        kept = max(1, round((self.fraction or DEFAULT_FRACTION) * num_samples))
        weights = torch.zeros(num_samples)
        weights[torch.randperm(num_samples, generator=generator)[:kept]] = 1
        return weights
