"""Decorrelated features

Members whose hidden features are uncorrelated look at different properties of an input. The model gives its last hidden
layer beside its prediction, and the method penalises the covariances between the features of any two members: (1/M)
sum_i l(h_i, y) + w / (2 M (M - 1)) sum_{i != j} ||C_ij||², where C_ij is the matrix of covariances of the features of
members i and j over the batch, and ||·|| the Frobenius norm. Cogswell et al. 2016, Reducing Overfitting in Deep
Networks by Decorrelating Representations, penalise the covariances inside one network in this form (DeCov).

```toml
[model]
name = "feature_network"

[method]
name = "feature_decorrelation"
strength = 1.0
```
"""

from __future__ import annotations

from math import prod

import torch
from pydantic import Field
from torch import nn

from ensemblekit import Method, Model, hookimpl


class FeatureNetwork(Model):
    """A network with one hidden layer, which it gives beside its prediction."""

    hidden: int = Field(32, ge=1, description="number of features")

    def extra_outputs(self, input_shape):
        return {"features": self.hidden}

    def build(self, input_shape, num_outputs):
        layers = nn.Flatten(), nn.Linear(prod(input_shape), self.hidden), nn.ReLU()
        return nn.Sequential(*layers, WithInputs(self.hidden, num_outputs))


class WithInputs(nn.Linear):
    """A linear layer that also gives its inputs."""

    def forward(self, inputs):
        return torch.cat([super().forward(inputs), inputs], dim=-1)


class FeatureDecorrelation(Method):
    """Penalises covariances between the features of different members."""

    paper = "Cogswell et al. 2016, Reducing Overfitting in Deep Networks by Decorrelating Representations"
    formula = "(1/M) sum_i l(h_i, y) + w / (2 M (M - 1)) sum_{i != j} ||C_ij||²"

    strength: float = Field(1.0, ge=0, description="weight w of the covariances")

    def required_outputs(self):
        return ("features",)

    @hookimpl
    def ensemble_loss(self, named, num_members):
        features = named["features"] - named["features"].mean(dim=1, keepdim=True)
        batch = features.shape[1]
        covariances = torch.einsum("ibk,jbl->ijkl", features, features) / batch
        between = covariances.square().sum() - covariances.diagonal(dim1=0, dim2=1).square().sum()
        return (self.strength / (2 * num_members * max(num_members - 1, 1)) * between).expand(batch)
