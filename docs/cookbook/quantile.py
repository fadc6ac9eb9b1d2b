"""Quantile regression

Members predict several quantiles of the target instead of its mean, each with the pinball loss: l = sum_q max(q (y -
z_q), (q - 1) (y - z_q)), which is least if y lies below z_q with probability q. The quantiles of the ensemble are the
means of the members' quantiles, and 0.1 and 0.9 enclose an interval that contains 80 % of the targets. The median is
the point prediction of metrics and tables. Koenker and Bassett 1978, Regression Quantiles.

```toml
[data]
name = "diabetes"

[training.loss]
name = "pinball"
quantiles = [0.1, 0.5, 0.9]
```
"""

from __future__ import annotations

import torch
from pydantic import Field, field_validator

from ensemblekit import Loss


class Pinball(Loss):
    """The pinball loss of several quantiles, one of which is the median."""

    paper = "Koenker and Bassett 1978, Regression Quantiles"
    formula = "l = sum_q max(q (y - z_q), (q - 1) (y - z_q))"
    takes = "values"
    twice_differentiable = False

    quantiles: tuple[float, ...] = Field((0.1, 0.5, 0.9), description="probabilities of the quantiles, with 0.5")

    @field_validator("quantiles")
    @classmethod
    def are_probabilities(cls, quantiles):
        if 0.5 not in quantiles or not all(0 < q < 1 for q in quantiles):
            raise ValueError("give probabilities between 0 and 1, and 0.5 among them")
        return quantiles

    def num_outputs(self, info):
        return len(self.quantiles) * info.num_outputs

    def prepare(self, outputs, target):
        return target.reshape(len(target), -1).to(outputs.dtype)

    def per_sample(self, outputs, target):
        error = target.unsqueeze(-2) - self.of_quantiles(outputs)  # (..., Q, T)
        levels = torch.tensor(self.quantiles, dtype=outputs.dtype, device=outputs.device).unsqueeze(-1)
        return torch.maximum(levels * error, (levels - 1) * error).sum(dim=(-2, -1))

    def of_quantiles(self, outputs):
        return outputs.unflatten(-1, (len(self.quantiles), -1))

    def point(self, outputs):
        return self.of_quantiles(outputs)[..., self.quantiles.index(0.5), :]

    def rescale(self, outputs, convert):
        return convert(self.of_quantiles(outputs)).flatten(-2)
