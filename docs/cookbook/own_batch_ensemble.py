"""BatchEnsemble

All members share the weights W of each layer; member k multiplies them by a matrix of rank one of its own, s_k r_k^T,
and adds its own bias: h_k(x) = s_k * W(r_k * x) + b_k. One more member costs three vectors for each layer. The factors
start as random signs, so that members start different. The model is a family: one network (B, ...) -> (K, B, C)
computes all members, and there is no loop over them. Wen et al. 2020, BatchEnsemble: An Alternative Approach to
Efficient Ensemble and Lifelong Learning.

```toml
[model]
name = "own_batch_ensemble"
hidden = [32]
```
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from pydantic import Field
from torch import nn

from ensemblekit import Family


class RankOneLinear(nn.Module):
    """(B, inputs), which all members share, or (K, B, inputs) → (K, B, outputs)."""

    def __init__(self, members, inputs, outputs):
        super().__init__()
        self.shared = nn.Linear(inputs, outputs, bias=False)
        self.r, self.s = (nn.Parameter(torch.randint(2, (members, 1, n)) * 2.0 - 1) for n in (inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, features):
        return self.shared(features * self.r) * self.s + self.bias


class OwnBatchEnsemble(Family):
    """Perceptrons that share their weights up to factors of rank one."""

    paper = "Wen et al. 2020, BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong Learning"
    formula = "[s_k * W(r_k * x) + b_k, ReLU] for each hidden layer, s_k * W(r_k * x) + b_k"

    hidden: tuple[int, ...] = Field((64, 64), description="sizes of the hidden layers")

    def build_family(self, input_shape, num_outputs, num_members):
        layers = [nn.Flatten()]
        for inputs, outputs in pairwise((prod(input_shape), *self.hidden, num_outputs)):
            layers += [RankOneLinear(num_members, inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
