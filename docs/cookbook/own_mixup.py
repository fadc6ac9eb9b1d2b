"""Mixing samples: mixup

Each training sample is replaced by a mixture with another one of its batch, x = s x_a + (1 - s) x_b, and its objective
is mixed by the same share: s times that of the label of a, 1 - s times that of the label of b. Between samples, outputs
become linear, and members less confident. The plugin says who is mixed with whom and by which share; losses and methods
stay as they are. The built-in `mixup` takes shares from a beta distribution; here they are uniform, and at least one
half, so that a sample is mostly itself. Zhang et al. 2018, mixup: Beyond Empirical Risk Minimization.

```toml
[training]
mix = { name = "uniform_mixup", least = 0.7 }
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import BatchAugmentation


class UniformMixup(BatchAugmentation):
    """Mixes each sample with another one of its batch, by a uniform share."""

    paper = "Zhang et al. 2018, mixup: Beyond Empirical Risk Minimization"
    formula = "x = s x_a + (1 - s) x_b,  s uniform from least to 1"

    least: float = Field(0.5, ge=0, le=1, description="smallest share of the sample itself")

    def sample(self, num_samples, generator):
        return torch.rand(num_samples, 2, generator=generator)

    def apply(self, inputs, sampled):
        partner = sampled[:, 0].argsort(stable=True)
        share = self.least + (1 - self.least) * sampled[:, 1]
        own = share.view(-1, *[1] * (inputs.ndim - 1))
        return own * inputs + (1 - own) * inputs[partner], partner, share
