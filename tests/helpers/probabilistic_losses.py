"""Losses with more outputs than targets: a mean with a variance, and several quantiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from ensemblekit import DataInfo, Loss


class NormalNLL(Loss):
    """Negative log-likelihood of a normal distribution, whose mean and logarithm of the variance are the outputs."""

    formula = "l = 1/2 (s + (y - m)^2 exp(-s))"
    takes = "values"

    def num_outputs(self, info: DataInfo) -> int:
        return 2 * info.num_outputs

    def slices(self, num_outputs: int) -> Mapping[str, int]:
        return {"mean": num_outputs // 2, "log_variance": num_outputs // 2}

    def prepare(self, outputs: Tensor, target: Tensor) -> Tensor:
        return target.reshape(target.shape[0], -1).to(outputs.dtype)

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=-1)
        return 0.5 * (log_variance + (target - mean).square() * (-log_variance).exp()).sum(dim=-1)

    def point(self, outputs: Tensor) -> Tensor:
        return outputs.chunk(2, dim=-1)[0]

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=-1)
        unit = convert(torch.ones_like(mean)) - convert(torch.zeros_like(mean))
        return torch.cat([convert(mean), log_variance + 2 * unit.abs().log()], dim=-1)


class Pinball(Loss):
    """The pinball loss of several quantiles; the median is the point prediction."""

    formula = "l = sum_q max(q (y - z_q), (q - 1) (y - z_q))"
    takes = "values"
    twice_differentiable = False

    quantiles: tuple[float, ...] = Field((0.5, 0.1, 0.9), description="of the quantiles, the median first")

    def num_outputs(self, info: DataInfo) -> int:
        return len(self.quantiles) * info.num_outputs

    def slices(self, num_outputs: int) -> Mapping[str, int]:
        return {f"quantile_{q:g}": num_outputs // len(self.quantiles) for q in self.quantiles}

    def prepare(self, outputs: Tensor, target: Tensor) -> Tensor:
        return target.reshape(target.shape[0], -1).to(outputs.dtype)

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = outputs.new_zeros(outputs.shape[:-1])
        for q, values in zip(self.quantiles, outputs.chunk(len(self.quantiles), dim=-1), strict=True):
            error = target - values
            losses = losses + torch.maximum(q * error, (q - 1) * error).sum(dim=-1)
        return losses

    def point(self, outputs: Tensor) -> Tensor:
        return outputs.chunk(len(self.quantiles), dim=-1)[0]

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([convert(part) for part in outputs.chunk(len(self.quantiles), dim=-1)], dim=-1)
