"""Deep mutual learning

Each member learns the labels and the probabilities of every other member: (1/M) sum_i [l(h_i, y) + w mean over j != i
of KL(p_j, p_i)], where the teacher p_j is a constant. The weight w grows linearly to `strength` over the warm-up, so
that members do not copy each other's first guesses. Zhang et al. 2018, Deep Mutual Learning.

```toml
[method]
name = "mutual_learning"
warmup = 0.5
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl


class MutualLearning(Method):
    """Every member teaches every other one."""

    paper = "Zhang et al. 2018, Deep Mutual Learning"
    formula = "(1/M) sum_i [l(h_i, y) + w / (M - 1) sum_{j != i} KL(p_j, p_i)]"

    strength: float = Field(1.0, ge=0, description="weight of the divergence after the warm-up")
    warmup: float = Field(0.5, gt=0, le=1, description="share of the training over which the weight grows")

    @hookimpl
    def member_loss(self, outputs, target, loss, num_members, progress):
        weight = self.strength * min(1.0, progress / self.warmup)
        teachers = loss.probabilities(outputs).detach()
        negentropy = torch.special.xlogy(teachers, teachers).sum(dim=-1)  # (M, B)
        cross = torch.einsum("jbc,ibc->ijb", teachers, loss.log_probabilities(outputs))
        divergence = negentropy - cross  # row i: KL(p_j, p_i) for each j, zero for j = i
        return (loss(outputs, target) + weight * divergence.sum(dim=1) / (num_members - 1)) / num_members

    def check_spec(self, spec):
        if spec.ensemble.members < 2:
            yield Problem("/ensemble.members", "a single member has nobody to learn from", "set it to 2 or more")
