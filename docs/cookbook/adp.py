"""Adaptive diversity promoting (ADP)

Members should agree on the true class and differ in how they rank the other classes. Each member learns the labels;
the entropy H of the mean probabilities is rewarded, and so is the volume that the members' probabilities of the wrong
classes span: (1/M) sum_i l(h_i, y) - alpha H(mean p) - beta log det(Q Q^T). Row i of Q are member i's probabilities
of the wrong classes, scaled to length one. The volume needs fewer members than classes. Pang et al. 2019, Improving
Adversarial Robustness via Promoting Ensemble Diversity.

```toml
[method]
name = "adp"
alpha = 1.0
beta = 0.5
```
"""

from __future__ import annotations

import math

import torch
from pydantic import Field

from ensemblekit import Method, Problem, hookimpl


class ADP(Method):
    """Rewards members that rank the wrong classes differently."""

    paper = "Pang et al. 2019, Improving Adversarial Robustness via Promoting Ensemble Diversity"
    formula = "(1/M) sum_i l(h_i, y) - alpha H(mean p) - beta log det(Q Q^T)"

    alpha: float = Field(2.0, ge=0, description="weight of the entropy")
    beta: float = Field(0.5, ge=0, description="weight of the volume")

    @hookimpl
    def ensemble_loss(self, outputs, target, loss, num_members):
        logs = loss.log_probabilities(outputs)  # in logarithms, nothing underflows
        log_mean = logs.logsumexp(dim=0) - math.log(num_members)
        entropy = -(log_mean.exp() * log_mean).sum(dim=-1)
        classes = torch.arange(logs.shape[-1], device=target.device)
        wrong = logs.masked_fill(classes == target.unsqueeze(-1), -math.inf).softmax(dim=-1)
        directions = torch.nn.functional.normalize(wrong, dim=-1).transpose(0, 1)  # (B, M, C)
        identity = 1e-6 * torch.eye(num_members, dtype=outputs.dtype, device=outputs.device)
        volume = torch.logdet(directions @ directions.mT + identity)
        return -self.alpha * entropy - self.beta * volume

    def check_data(self, spec, info):
        if info.task != "classification" or info.num_outputs <= spec.ensemble.members:
            yield Problem("", "needs more classes than members", "lower ensemble.members, or use other data")
