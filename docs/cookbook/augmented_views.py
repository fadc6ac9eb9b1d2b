"""Noisy views

In training, each member sees every sample with noise of its own, h_i(x + σ ε_i) with ε_i ~ N(0, 1), new in every step.
Noise smooths each member like a penalty of its weights, and noise that differs keeps members apart, so that their mean
gains more. In predictions all members see the samples as they are. Any other augmentation of a batch of tensors can be
written in this form. Raviv and Intrator 1996, Bootstrapping with Noise: An Effective Regularization Technique.

```toml
[method]
name = "noisy_views"
noise = 0.1
```
"""

from __future__ import annotations

import math

from pydantic import Field

from ensemblekit import Method, hookimpl


class NoisyViews(Method):
    """Adds noise to the inputs in training, different noise for each member."""

    paper = "Raviv and Intrator 1996, Bootstrapping with Noise: An Effective Regularization Technique"
    formula = "(1/M) sum_i l(h_i(x + σ ε_i), y), ε_i ~ N(0, 1)"

    noise: float = Field(0.1, ge=0, description="standard deviation σ of the noise")

    @hookimpl
    def member_inputs(self, inputs, uniform, training):
        if not training:
            return None
        radius = (-2 * (1 - uniform(*inputs.shape)).log()).sqrt()  # Box and Muller: two uniform numbers, a normal one
        normal = radius * (2 * math.pi * uniform(*inputs.shape)).cos()
        return inputs + self.noise * normal.to(inputs.dtype)
