"""The pinball loss of quantiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, field_validator

from ensemblekit import DataInfo, Loss

if TYPE_CHECKING:
    from torch import Tensor


class Quantile(Loss):
    """Real values with intervals: networks predict quantiles of each value, which are averaged over the members.

    The point prediction is the median, or else the mean of the two quantiles next to it. In predictions the quantiles
    of a value are sorted, since those of a network may cross.
    """

    paper = "Koenker and Bassett 1978, Regression Quantiles"
    formula = "l = sum_q max(q (y - z_q), (q - 1) (y - z_q))"
    takes = "values"
    tasks = ("regression",)
    twice_differentiable = False

    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.05, 0.5, 0.95), min_length=1, description="which quantiles, ascending; the outer two are the interval"
    )

    @field_validator("quantiles")
    @classmethod
    def _ascending(cls, quantiles: tuple[float, ...]) -> tuple[float, ...]:
        if list(quantiles) != sorted(set(quantiles)):
            raise ValueError("must be ascending, each once")
        return quantiles

    def num_outputs(self, info: DataInfo) -> int:
        return len(self.quantiles) * info.num_outputs

    def slices(self, num_outputs: int) -> Mapping[str, int]:
        return {name: num_outputs // len(self.quantiles) for name in self._names}

    @property
    def _names(self) -> list[str]:
        return [f"quantile_{quantile:g}" for quantile in self.quantiles]

    def _parts(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Split outputs (..., Q · T) into those of each quantile (..., T)."""
        return outputs.chunk(len(self.quantiles), dim=-1)

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = outputs.new_zeros(outputs.shape[:-1])
        for quantile, values in zip(self.quantiles, self._parts(outputs), strict=True):
            error = target - values
            losses = losses + torch.maximum(quantile * error, (quantile - 1) * error).sum(dim=-1)
        return losses

    def point(self, outputs: Tensor) -> Tensor:
        parts = self._parts(outputs)
        below = max((i for i, quantile in enumerate(self.quantiles) if quantile <= 0.5), default=0)
        above = min((i for i, quantile in enumerate(self.quantiles) if quantile >= 0.5), default=len(parts) - 1)
        return (parts[below] + parts[above]) / 2

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([convert(part) for part in self._parts(outputs)], dim=-1)

    def mixture(self, outputs: Tensor) -> Tensor:
        mean = outputs.mean(dim=0)
        return torch.stack(self._parts(mean)).sort(dim=0).values.movedim(0, -2).flatten(-2)

    def intervals(self, outputs: Tensor) -> Mapping[str, Tensor]:
        return dict(zip(self._names, self._parts(outputs), strict=True))

    def metrics(self, combined: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        if len(self.quantiles) < 2:
            return {}
        low, *_, high = self._parts(combined)
        inside = (low <= target) & (target <= high)
        return {"interval_coverage": inside.double().mean(), "interval_width": (high - low).mean()}
