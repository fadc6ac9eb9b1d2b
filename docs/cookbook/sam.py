"""Sharpness-aware minimisation (SAM)

A step takes the gradient not at the weights θ but at the worst point of a small ball around them, and applies it to θ.
Minima are then flat, and flat minima tend to generalise: θ ← θ - η ∇L(θ + ρ ∇L(θ) / ||∇L(θ)||). Each member has a ball
of its own. A step costs two passes. It can be listed beside any method without second inputs, whose objective is L.
Foret et al. 2021, Sharpness-Aware Minimization for Efficiently Improving Generalization.

```toml
[method]
name = "sam"
radius = 0.05
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Method, hookimpl


class SAM(Method):
    """Takes the gradient of each step at the worst weights nearby."""

    paper = "Foret et al. 2021, Sharpness-Aware Minimization for Efficiently Improving Generalization, eq. 2 and 3"
    formula = "θ ← θ - η ∇L(θ + ρ ∇L(θ) / ||∇L(θ)||)"

    radius: float = Field(0.05, ge=0, description="radius ρ of the ball in which the worst weights are looked for")

    @hookimpl
    def second_weights(self, weights, gradient):
        norm = gradient.norm(dim=1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
        return weights + self.radius * (gradient / norm)
