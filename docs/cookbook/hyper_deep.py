"""Hyper-deep ensembles

Members differ in their hyperparameters and not only in their initial weights, which makes them more diverse. Groups set
what differs: dropout, learning rate, weight decay, label smoothing. Some settings turn out to be poor, so that the
combiner selects members greedily: starting from none, it adds the member that lowers the loss of the mean output on the
validation data most, possibly one that it has added before, until nothing is gained. The ensemble is then f = sum_i w_i
h_i, where w_i is how often member i was selected, divided by the number of selections. Wenzel et al. 2020,
Hyperparameter Ensembles for Robustness and Uncertainty Quantification; greedy selection: Caruana et al. 2004, Ensemble
Selection from Libraries of Models.

```toml
[training.optimizer]
name = "adamw"
lr = 0.003

[ensemble]
combiner = "greedy_selection"

[[ensemble.groups]]
members = 2

[[ensemble.groups]]
members = 2
model = { dropout = 0.2 }
optimizer = { lr = 0.01, weight_decay = 0.1 }

[[ensemble.groups]]
members = 2
optimizer = { weight_decay = 0.001 }
loss = { label_smoothing = 0.1 }
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Combination, hookimpl


class GreedySelection(Combination):
    """A mean of members that are selected greedily on the validation data, some of them several times."""

    paper = "Caruana et al. 2004, Ensemble Selection from Libraries of Models"
    formula = "f = sum_i w_i h_i,  w_i = how often member i was selected, as a share"

    size: int = Field(20, ge=1, description="largest number of selections")

    @hookimpl
    def combine(self, outputs, fitted):
        return outputs.mean(dim=0) if fitted is None else torch.einsum("m,mbc->bc", fitted, outputs)

    @hookimpl
    def fit_combiner(self, outputs, target, loss):
        counts, total, best = outputs.new_zeros(len(outputs)), torch.zeros_like(outputs[0]), None
        for number in range(1, self.size + 1):
            # one candidate at a time: members may have losses of their own, and the ensemble has the common one
            losses = torch.stack([loss((total + output) / number, target).mean() for output in outputs])
            value, member = losses.min(dim=0)
            if best is not None and bool(value >= best):
                break
            counts[member] += 1
            total, best = total + outputs[member], value
        return counts / counts.sum()
