"""Random subspaces

Each member sees its own random part of the features, always the same one; it sees zeros instead of the others: h_i(x ⊙
m_i), where the mask m_i keeps a share of the features. Members that see different features make different errors. Zero
should be a neutral value of a feature, as it is in standardised data. Ho 1998, The Random Subspace Method for
Constructing Decision Forests.

```toml
[method]
name = "random_subspaces"
share = 0.5
```
"""

from __future__ import annotations

from pydantic import Field

from ensemblekit import Method, hookimpl


class RandomSubspaces(Method):
    """Shows each member a fixed random part of the features."""

    paper = "Ho 1998, The Random Subspace Method for Constructing Decision Forests"
    formula = "h_i(x ⊙ m_i), m_i with share · d entries of 1"

    share: float = Field(0.5, gt=0, le=1, description="share of the features that a member sees")

    @hookimpl
    def member_inputs(self, inputs, uniform):
        order = uniform(inputs[0].numel(), fixed=True).argsort(dim=1).argsort(dim=1)  # (K, d): ranks of the features
        mask = (order < self.share * order.shape[1]).view(-1, 1, *inputs.shape[1:])
        return inputs * mask
