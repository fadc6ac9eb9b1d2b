"""The optimizer Lion

An optimizer is a plugin, too. Lion moves every weight by the same distance: it uses only the sign of a running mean of
gradients, u = sign(β₁ m + (1 - β₁) g), θ ← θ - η (u + λ θ), m ← β₂ m + (1 - β₂) g. It keeps one number for each weight,
where Adam keeps two, and needs a learning rate that is three to ten times smaller. It is element-wise, so that engines
may join the weights of several members. Chen et al. 2023, Symbolic Discovery of Optimization Algorithms.

```toml
[training.optimizer]
name = "lion"
lr = 0.0003
weight_decay = 0.01
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import OptimizerPlugin


class Lion(OptimizerPlugin):
    """Moves weights by the sign of a running mean of gradients."""

    paper = "Chen et al. 2023, Symbolic Discovery of Optimization Algorithms"
    formula = "θ ← θ - η (sign(β₁ m + (1 - β₁) g) + λ θ),  m ← β₂ m + (1 - β₂) g"
    elementwise = True

    lr: float = Field(1e-4, gt=0, description="learning rate η")
    betas: tuple[float, float] = Field((0.9, 0.99), description="shares β₁ and β₂ of former gradients")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay λ")

    def build(self, parameters):
        return SignOfMomentum(parameters, {"lr": self.lr, "betas": self.betas, "decay": self.weight_decay})


class SignOfMomentum(torch.optim.Optimizer):
    """The optimizer itself, as torch defines one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.lerp(weight.grad, 1 - first).sign()
                weight.sub_(group["lr"] * (direction + group["decay"] * weight))
                momentum.lerp_(weight.grad, 1 - second)
