"""A shared trunk with several heads

All members share a trunk f and differ only in their last layers: h_k(x) = W_k f(x) + b_k. This is the cheapest
ensemble, and the least diverse one, so that it is often trained with a method that makes heads specialise, such as
`smcl`. The heads are one tensor and one product, so that their number costs little time. Lee et al. 2015, Why M Heads
are Better than One: Training a Diverse Ensemble of Deep Networks.

```toml
[model]
name = "own_heads"
hidden = 32
```
"""

from __future__ import annotations

from math import prod

import torch
from pydantic import Field
from torch import nn

from ensemblekit import Family


class Heads(nn.Module):
    """A linear layer for each member on common features: (B, inputs) → (K, B, outputs)."""

    def __init__(self, members, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(members, inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, features):
        return torch.einsum("bi,kio->kbo", features, self.weight) + self.bias


class OwnHeads(Family):
    """A small trunk with a linear head for each member."""

    paper = "Lee et al. 2015, Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks"
    formula = "W_k ReLU(V x + c) + b_k"

    hidden: int = Field(64, ge=1, description="size of the trunk's layer")

    def build_family(self, input_shape, num_outputs, num_members):
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), self.hidden), nn.ReLU())
        return nn.Sequential(*trunk, Heads(num_members, self.hidden, num_outputs))
