"""AdaBelief with the bits of adabelief-pytorch in its usual setting, and without the work that it throws away there.

The package finds the denominator of the update twice where the update is rectified, and multiplies by the decay also
where that is 1. On a tensor with the parameters of many members, that is a third of its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from adabelief_pytorch import AdaBelief
from torch import Tensor


class LeanAdaBelief(AdaBelief):  # type: ignore[misc]  # the package has no types
    """The package's optimizer; settings other than its default ones are left to it. Gradients are used up."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter with a gradient."""
        groups = self.param_groups
        half = any(parameter.dtype == torch.float16 for group in groups for parameter in group["params"])
        if closure or half or not (self.rectify and self.weight_decouple) or any(group["amsgrad"] for group in groups):
            return super().step(closure)
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter.data, parameter.grad, self._state(parameter), group)
        return None

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_var": torch.zeros_like(parameter)}
        return state

    def _update(self, value: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rate, eps = group["lr"], group["eps"]
        first, second = group["betas"]
        if group["weight_decay"]:
            value.mul_(1.0 - (1.0 if self.fixed_decay else rate) * group["weight_decay"])
        state["step"] += 1
        mean, variance = state["exp_avg"], state["exp_avg_var"]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        surprise = gradient.sub_(mean)
        variance.mul_(second).addcmul_(surprise, surprise, value=1 - second).add_(eps)
        factor = rectification(state["step"], second)
        if factor is not None:
            denominator = torch.sqrt(variance, out=surprise).add_(eps)
            value.addcdiv_(mean, denominator, value=-(factor / (1 - first ** state["step"])) * rate)
        elif self.degenerated_to_sgd:
            value.add_(mean, alpha=-(1.0 / (1 - first ** state["step"])) * rate)


def rectification(step: int, second: float) -> float | None:
    """What RAdam multiplies the update by (Liu et al. 2020, eq. 5); None while the variance is not to be relied on."""
    decayed = second**step
    longest = 2 / (1 - second) - 1
    length = longest - 2 * step * decayed / (1 - decayed)
    if length < 5:  # more cautious than 4, since it is an approximation
        return None
    ratio = (1 - decayed) * (length - 4) / (longest - 4) * (length - 2) / length * longest / (longest - 2)
    return math.sqrt(ratio)
