"""AdaBelief (Zhuang et al. 2020) with RAdam's rectification, as in the authors' package adabelief-pytorch.

The updates are bit-identical to the package's (a test compares them), with less work: the package computes the
denominator of a rectified update twice and multiplies by the weight decay even if that is zero. On a flat tensor with
the parameters of many members, that is a third of its time. On a CPU, compiled code makes the default update in one
pass over the memory; it differs from torch's only where that does not round a square root correctly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core import kernels


class AdaBelief(torch.optim.Optimizer):
    """Adapts the step size by the belief in the gradient: its squared deviation from its moving average.

    Gradients are used as scratch memory: after `step` they no longer hold the gradient.

    Args:
        params: parameters to optimise.
        lr: learning rate.
        betas: decay of the moving averages of the gradient and of its squared deviation.
        eps: added to the deviation, inside and outside the square root.
        weight_decay: rate of weight decay.
        amsgrad: use the largest deviation so far.
        weight_decouple: decay the weights themselves (AdamW) instead of adding the decay to the gradient.
        fixed_decay: with `weight_decouple`, do not scale the decay by the learning rate.
        rectify: rectify the step size while the average of the deviation is unreliable, as RAdam does.
        degenerated_to_sgd: with `rectify`, take plain momentum steps where the step size cannot be rectified.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        weight_decouple: bool = True,
        fixed_decay: bool = False,
        rectify: bool = True,
        degenerated_to_sgd: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError("lr, eps and weight_decay must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults)
        self.weight_decouple, self.fixed_decay = weight_decouple, fixed_decay
        self.rectify, self.degenerated_to_sgd = rectify, degenerated_to_sgd

    # torch's own imports its compiler when it is first called, which takes longer than a small training
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, self._state(parameter, group), group)
        return loss

    # torch wraps `step` of every optimizer for its profiler, which takes as long as a step of a tiny network
    step.hooked = True  # type: ignore[attr-defined]

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_var": torch.zeros_like(parameter)}
            if group["amsgrad"]:
                state["max_exp_avg_var"] = torch.zeros_like(parameter)
        return state

    def _is_default(self, group: dict[str, Any]) -> bool:
        """Whether the update is the one that there is compiled code for."""
        return self.rectify and self.degenerated_to_sgd and not group["amsgrad"]

    def _update(self, value: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rate, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        if decay and self.weight_decouple:
            value.mul_(1.0 - (1.0 if self.fixed_decay else rate) * decay)
        elif decay:
            gradient.add_(value, alpha=decay)
        state["step"] += 1
        mean, variance = state["exp_avg"], state["exp_avg_var"]
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        if self._is_default(group) and kernels.accept(value, gradient, mean, variance):
            factor = rectification(state["step"], beta2)
            numbers = (beta1, beta2, 1 - beta1, 1 - beta2, eps, -((factor or 1.0) / correction1) * rate)
            memory = (tensor.data_ptr() for tensor in (value, mean, variance, gradient))
            plan = kernels.Update(*memory, value.numel(), *numbers, is_adaptive=factor is not None)
            kernels.adabelief(plan, torch.get_num_threads())
            return
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        deviation = gradient.sub_(mean)  # in the gradient's memory: nobody reads it after this step
        variance.mul_(beta2).addcmul_(deviation, deviation, value=1 - beta2).add_(eps)
        if group["amsgrad"]:
            torch.max(state["max_exp_avg_var"], variance, out=state["max_exp_avg_var"])
        if not self.rectify:
            largest = state["max_exp_avg_var"] if group["amsgrad"] else variance
            denominator = torch.sqrt(largest, out=deviation).div_(math.sqrt(correction2)).add_(eps)
            value.addcdiv_(mean, denominator, value=-rate / correction1)
        elif (factor := rectification(state["step"], beta2)) is not None:  # which ignores amsgrad, as the package does
            denominator = torch.sqrt(variance, out=deviation).add_(eps)
            value.addcdiv_(mean, denominator, value=-(factor / correction1) * rate)
        elif self.degenerated_to_sgd:
            value.add_(mean, alpha=-(1.0 / correction1) * rate)


def rectification(step: int, beta2: float) -> float | None:
    """Return RAdam's factor of the step size (Liu et al. 2020, eq. 5); None while the variance is unreliable."""
    decayed = beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * decayed / (1 - decayed)
    if length < 5:  # the paper says 4; the reference code takes 5, since the length is an approximation
        return None
    ratio = (1 - decayed) * (length - 4) / (longest - 4) * (length - 2) / length * longest / (longest - 2)
    return math.sqrt(ratio)
