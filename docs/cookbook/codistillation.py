"""Co-distillation with a warm-up

Each member learns the labels and, once training has warmed up, also the mean probabilities of the other members, which
are constants in its gradient: (1/M) sum_i [l(h_i, y) + w KL(mean of p_j over j != i, p_i)], with w = 0 during the
warm-up. `progress` is the share of the training that is done. Anil et al. 2018, Large Scale Distributed Neural Network
Training through Online Distillation.

```toml
[method]
name = "codistillation"
warmup = 0.2
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl


class Codistillation(Method):
    """Members learn from the mean prediction of the others."""

    paper = "Anil et al. 2018, Large Scale Distributed Neural Network Training through Online Distillation"
    formula = "(1/M) sum_i [l(h_i, y) + w KL(mean_{j != i} p_j, p_i)]"

    strength: float = Field(1.0, ge=0, description="weight of the agreement with the others after the warm-up")
    warmup: float = Field(0.2, ge=0, lt=1, description="share of the training without it")

    @hookimpl
    def member_loss(self, outputs, target, loss, num_members, progress):
        own = loss(outputs, target)
        if progress >= self.warmup:
            probabilities = loss.probabilities(outputs).detach()
            others = (probabilities.sum(dim=0) - probabilities) / (num_members - 1)
            divergence = torch.special.xlogy(others, others) - others * loss.log_probabilities(outputs)
            own = own + self.strength * divergence.sum(dim=-1)
        return own / num_members

    def check_spec(self, spec):
        if spec.ensemble.members < 2:
            yield Problem("/ensemble.members", "a single member has nobody to learn from", "set it to 2 or more")
