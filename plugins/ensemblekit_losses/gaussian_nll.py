"""The negative log-likelihood of normal distributions, also weighted by their variance (β-NLL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import DataInfo, Loss

if TYPE_CHECKING:
    from torch import Tensor

LEVEL = 0.9
"""Share of the values that the interval of the metrics should contain."""


class GaussianNLL(Loss):
    """Real values with their uncertainty: networks predict a mean and the logarithm of a variance for each value.

    In predictions the ensemble is the normal distribution with mean and variance of the mixture of its members, so
    that its variance includes their disagreement. The constant log(2 pi) / 2 is left out, except in the metric `nll`.
    """

    paper = "Nix and Weigend 1994; Lakshminarayanan et al. 2017; for beta > 0 Seitzer et al. 2022, beta-NLL"
    formula = "l = 1/2 (s + (y - m)^2 exp(-s)) · stop_gradient(exp(beta s)),  outputs m and s = log(variance)"
    takes = "values"
    tasks = ("regression",)

    beta: float = Field(
        0.0, ge=0, le=1, description="samples count by their predicted variance to this power: 0 is the likelihood"
    )

    @property
    def twice_differentiable(self) -> bool:  # type: ignore[override]  # it depends on a parameter
        return self.beta == 0  # a gradient that is stopped is the derivative of nothing

    def num_outputs(self, info: DataInfo) -> int:
        return 2 * info.num_outputs

    def slices(self, num_outputs: int) -> Mapping[str, int]:
        return {"mean": num_outputs // 2, "log_variance": num_outputs // 2}

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=-1)
        losses = 0.5 * (log_variance + (target - mean).square() * (-log_variance).exp())
        if self.beta:
            losses = losses * (self.beta * log_variance.detach()).exp()
        return losses.sum(dim=-1)

    def quadratic_form(self, at: Tensor, target: Tensor, direction: Tensor) -> Tensor:
        mean, log_variance = at.chunk(2, dim=-1)
        along_mean, along_variance = direction.chunk(2, dim=-1)
        error = mean - self.prepare(at, target)
        # e^-s (a² - 2 r a b + r² b² / 2) with r = m - y and d = (a, b)
        form = along_mean.square() - 2 * error * along_mean * along_variance + 0.5 * (error * along_variance).square()
        return ((-log_variance).exp() * form).sum(dim=-1)

    def third_derivative_bound(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor | None:
        if self.beta:
            return None
        values = self.prepare(end, target)
        (mean, log_variance), (other_mean, other_variance) = start.chunk(2, dim=-1), end.chunk(2, dim=-1)
        error = torch.maximum((mean - values).abs(), (other_mean - values).abs())
        precision = (-torch.minimum(log_variance, other_variance)).exp()
        # the entries are 0, -e^-s, r e^-s and -r² e^-s / 2; both factors are largest at an end of the segment
        largest = torch.maximum(error, 0.5 * error.square()).clamp_min(1)
        return (precision * largest).amax(dim=-1)

    def point(self, outputs: Tensor) -> Tensor:
        return outputs.chunk(2, dim=-1)[0]

    def rescale(self, outputs: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=-1)
        unit = convert(torch.ones_like(mean)) - convert(torch.zeros_like(mean))
        return torch.cat([convert(mean), log_variance + 2 * unit.abs().log()], dim=-1)

    def mixture(self, outputs: Tensor) -> Tensor:
        means, log_variances = outputs.chunk(2, dim=-1)
        mean = means.mean(dim=0)
        # mean(e^s + m²) - mean(m)², as a sum of two variances: no digits are lost to large means
        variance = log_variances.exp().mean(dim=0) + (means - mean).square().mean(dim=0)
        return torch.cat([mean, variance.log()], dim=-1)

    def intervals(self, outputs: Tensor) -> Mapping[str, Tensor]:
        return {"standard_deviation": (0.5 * outputs.chunk(2, dim=-1)[1]).exp()}

    def metrics(self, combined: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        mean, log_variance = combined.chunk(2, dim=-1)
        deviation = (0.5 * log_variance).exp()
        z = (target - mean) / deviation
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        # Gneiting and Raftery 2007, eq. 21
        crps = deviation * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
        width = float(torch.special.ndtri(torch.tensor((1 + LEVEL) / 2, dtype=torch.float64)))
        return {
            "nll": (0.5 * (log_variance + z.square() + math.log(2 * math.pi))).sum(dim=-1).mean(),
            "crps": crps.mean(),
            "interval_coverage": (z.abs() <= width).double().mean(),
            "interval_width": (2 * width * deviation).mean(),
        }
