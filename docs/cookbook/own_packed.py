"""Packed ensembles

One wide network is split into M members by grouped layers: group k of each layer sees group k of the layer before, and
all members see the input. Members share nothing, but one operation computes all of them. Each has alpha / M of the
width, so that alpha sets the price: with alpha = M they are M networks of the full width. A grouped linear layer is a
convolution over a single point. Laurent et al. 2023, Packed-Ensembles for Efficient Uncertainty Estimation.

```toml
[model]
name = "own_packed"
width = 48
alpha = 2.0
```
"""

from __future__ import annotations

from math import ceil, prod

from pydantic import Field
from torch import nn

from ensemblekit import Family


class MembersFirst(nn.Module):
    """(B, K * C, 1) → (K, B, C)."""

    def __init__(self, members):
        super().__init__()
        self.members = members

    def forward(self, outputs):
        return outputs.squeeze(2).unflatten(1, (self.members, -1)).transpose(0, 1)


class OwnPacked(Family):
    """Narrow perceptrons side by side in grouped layers."""

    paper = "Laurent et al. 2023, Packed-Ensembles for Efficient Uncertainty Estimation"
    formula = "two hidden layers of alpha width / M units for each of M members"

    width: int = Field(64, ge=1, description="size of the hidden layers of the network that is split")
    alpha: float = Field(2.0, gt=0, description="factor of the width: each member has alpha * width / M units")

    def build_family(self, input_shape, num_outputs, num_members):
        units = num_members * ceil(self.alpha * self.width / num_members)
        return nn.Sequential(
            nn.Flatten(),
            nn.Unflatten(1, (prod(input_shape), 1)),
            nn.Conv1d(prod(input_shape), units, 1),  # every member sees the whole input
            nn.ReLU(),
            nn.Conv1d(units, units, 1, groups=num_members),
            nn.ReLU(),
            nn.Conv1d(units, num_members * num_outputs, 1, groups=num_members),
            MembersFirst(num_members),
        )
