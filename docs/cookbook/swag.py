"""Gaussian weight averaging (SWAG)

One network is trained, and the weights that it passes through from step `start` on are described by a Gaussian: their
mean, their variances and, for the correlations, the last deviations D from the running mean. The members are samples of
this Gaussian: w = mean + sigma z / sqrt(2) + D^T z' / sqrt(2 (rank - 1)) with normal z and z' that never change. The
model is a family, which learns one network and predicts with all samples. Batch-norm statistics are those of the last
weights, so models without batch norm are the better choice. Maddox et al. 2019, A Simple Baseline for Bayesian
Uncertainty in Deep Learning.

```toml
[model]
name = "swag"
model = { name = "mlp", hidden = [32], batch_norm = false }
start = 4
every = 1
```
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from ensemblekit import Family, Model


class Swag(Family):
    """Members are samples of a Gaussian around the weights of one network."""

    paper = "Maddox et al. 2019, A Simple Baseline for Bayesian Uncertainty in Deep Learning, algorithm 1"
    formula = "w_i = mean + sigma z_i / sqrt(2) + D^T z'_i / sqrt(2 (rank - 1))"

    model: Model = Field(description="the model whose weights are described")
    start: int = Field(1000, ge=1, description="step whose weights are the first that count")
    every: int = Field(100, ge=1, description="steps between weights that count")
    rank: int = Field(10, ge=2, description="number of deviations that are kept")

    def build_family(self, input_shape, num_outputs, num_members):
        return Posterior(self.model.build_for(input_shape, num_outputs), self, num_members)


class Posterior(nn.Module):
    """A network that learns its weights and, in evaluation mode, computes with samples of their distribution."""

    def __init__(self, network, settings, num_members):
        super().__init__()
        self.network, self.start, self.every = network, settings.start, settings.every
        size, rank = sum(weight.numel() for weight in network.parameters()), settings.rank
        # before the first step, members are samples of the standard normal distribution: they start different
        zeros = {"steps": torch.zeros(()), "mean": torch.zeros(size), "deviations": torch.zeros(rank, size)}
        others = {"square": torch.ones(size), "noise": torch.randn(num_members, size + rank)}
        for name, value in (zeros | others).items():
            self.register_buffer(name, value)

    def forward(self, inputs):
        if self.training:
            self.count(torch.cat([weight.detach().flatten() for weight in self.network.parameters()]))
            return self.network(inputs).expand(len(self.noise), -1, -1)
        sigma = (self.square - self.mean.square()).clamp_min(0).sqrt()
        noise, low_rank = self.noise.split([len(sigma), len(self.deviations)], dim=1)
        samples = self.mean + (noise * sigma + low_rank @ self.deviations / (len(self.deviations) - 1) ** 0.5) / 2**0.5
        named = dict(self.network.named_parameters())
        parts = samples.split([weight.numel() for weight in named.values()], dim=1)
        stacked = {name: part.unflatten(1, named[name].shape) for name, part in zip(named, parts, strict=True)}
        return torch.func.vmap(lambda one: torch.func.functional_call(self.network, one, (inputs,)))(stacked)

    def count(self, weights):
        turn = self.steps.add_(1).sub(self.start)  # before the start, the mean is the last weights
        number = 1 + torch.div(turn, self.every, rounding_mode="floor").clamp(min=0)
        share = ((turn < 0) | (turn % self.every == 0)) / number
        self.mean.lerp_(weights, share)
        self.square.lerp_(weights.square(), share)
        row = torch.arange(len(self.deviations), device=weights.device) == (number - 1) % len(self.deviations)
        self.deviations[:] = torch.where((row & (share > 0)).unsqueeze(1), weights - self.mean, self.deviations)
