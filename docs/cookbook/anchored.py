"""Anchored ensembles

Each member is pulled towards the weights that it started with, its anchor, and not towards zero. Where the data says
little, members stay as different as their anchors are: (1/M) sum_i [mean l(h_i, y) + λ/N ||θ_i - a_i||²] with N
training samples. If anchors are sampled from a normal prior, l is half the squared error and λ = noise variance / (2 ·
prior variance), the members are approximate samples of the posterior. Here the initial weights are the anchors. Pearce
et al. 2020, Uncertainty in Neural Networks: Approximately Bayesian Ensembling.

```toml
[method]
name = "anchored"
strength = 0.5
```
"""

from __future__ import annotations

from pydantic import Field

from ensemblekit import Method, hookimpl


class Anchored(Method):
    """Pulls each member towards the weights that it started with."""

    paper = "Pearce et al. 2020, Uncertainty in Neural Networks: Approximately Bayesian Ensembling"
    formula = "(1/M) sum_i [mean l(h_i, y) + λ/N ||θ_i - a_i||²]"

    strength: float = Field(1.0, ge=0, description="weight λ of the squared distance to the anchor")

    @hookimpl
    def weight_penalty(self, weights, start, num_members, num_samples):
        distance = (weights - start).square().sum(dim=1)
        return self.strength / (num_members * num_samples) * distance
