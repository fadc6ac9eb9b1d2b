"""A member that is not a network

The nearest centroid is a classifier with a closed form: the score of class c is -||x - m_c||^2 / (2 v), with the class
means m_c and the variance v within classes, both over the samples with the member's weights. It is fitted once and then
frozen, and the networks beside it learn what it does not know, since GNCL also trains the mean of all members:
(1 - λ)/M sum_i l(h_i, y) + λ l(mean h, y). Whatever `fit` learns goes into buffers, which a run saves like those of any
network. Tibshirani et al. 2002, Diagnosis of multiple cancer types by shrunken centroids; Buschjäger et al. 2020.

```toml
[method]
name = "gncl"
lambda = 0.8

[[ensemble.groups]]
members = 2

[[ensemble.groups]]
members = 1
model = { name = "nearest_centroid" }
```
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from ensemblekit import Model, Problem


class Centroids(nn.Module):
    """Maps inputs (B, …) to the scores of the classes (B, C)."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.register_buffer("centroids", torch.zeros(num_outputs, num_inputs))
        self.register_buffer("variance", torch.ones(()))

    def forward(self, inputs):
        distances = (inputs.flatten(1).unsqueeze(1) - self.centroids).square().sum(dim=-1)
        return -distances / (2 * self.variance)


class NearestCentroid(Model):
    """Scores classes by the distance from their centroids, fitted once."""

    paper = "Tibshirani et al. 2002, Diagnosis of multiple cancer types by shrunken centroids"
    formula = "h_c(x) = -||x - m_c||^2 / (2 v)"
    fitted = True

    def build(self, input_shape, num_outputs):
        return Centroids(prod(input_shape), num_outputs)

    def fit(self, network, inputs, targets, weights, loss, seed):
        inputs, weights = inputs.flatten(1), torch.ones(len(inputs)) if weights is None else weights
        shares = weights.unsqueeze(1) * nn.functional.one_hot(targets, len(network.centroids))  # (N, C)
        network.centroids = shares.T @ inputs / shares.sum(dim=0).clamp_min(1e-6).unsqueeze(1)
        within = (inputs - network.centroids[targets]).square().mean(dim=1)
        network.variance = (weights * within).sum() / weights.sum()

    def check_data(self, spec, info):
        if info.task != "classification" or spec.loss.takes != "logits":
            yield Problem("", "gives scores of classes", 'use data with classes and loss = "cross_entropy"')
