"""The hooks that look inside a step of each member: its inputs and its weights. Results are checked here."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from ensemblekit.core.hooks import RunHooks


class MemberHooks:
    """What methods do to the inputs and the weights of K members, (K, …)."""

    def __init__(self, hooks: RunHooks) -> None:
        self.hooks = hooks

    @cached_property
    def have_views(self) -> bool:
        """Whether members see inputs of their own."""
        return self.hooks.is_implemented("member_inputs")

    @cached_property
    def have_second_inputs(self) -> bool:
        """Whether members also learn from inputs that are derived from those of the batch."""
        return self.hooks.is_implemented("second_inputs")

    @cached_property
    def have_second_weights(self) -> bool:
        """Whether the gradient of a step is taken at other weights than those that are updated."""
        return self.hooks.is_implemented("second_weights")

    @cached_property
    def have_penalty(self) -> bool:
        """Whether weights are penalised."""
        return self.hooks.is_implemented("weight_penalty")

    @cached_property
    def need_start(self) -> bool:
        """Whether the initial weights are needed."""
        return self.hooks.names("start", ["weight_penalty"])

    def views(self, inputs: Tensor, members: Tensor, uniform: Any, training: bool) -> Tensor:
        """Return the inputs (K, B, …) of K members from those of the batch (B, …)."""
        arguments = {"inputs": inputs, "members": members, "uniform": uniform, "training": training}
        views = self.hooks.call.member_inputs(**arguments)
        if views is None:
            return inputs.expand(len(members), *inputs.shape)
        self.hooks.check_result("member_inputs", views, (len(members), *inputs.shape), inputs, **arguments)
        result: Tensor = views
        return result

    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the inputs of the second pass; (B, …), or (K, B, …) for K members, like both arguments."""
        arguments = {"inputs": inputs, "gradient": gradient}
        second = self.hooks.call.second_inputs(**arguments)
        self.hooks.check_result("second_inputs", second, inputs.shape, inputs, **arguments)
        result: Tensor = second.detach()
        return result

    def second_weights(self, weights: Tensor, gradient: Tensor) -> Tensor:
        """Return the weights (K, P) at which the gradient of the step is taken."""
        arguments = {"weights": weights, "gradient": gradient}
        second = self.hooks.call.second_weights(**arguments)
        self.hooks.check_result("second_weights", second, weights.shape, weights, **arguments)
        result: Tensor = second.detach()
        return result

    def penalty(self, weights: Tensor, **arguments: Any) -> Tensor:
        """Return the sum of all penalties of the weights (K, P), a scalar."""
        arguments |= {"weights": weights}
        penalties = self.hooks.call.weight_penalty(**arguments)
        for penalty in penalties:
            self.hooks.check_result("weight_penalty", penalty, (len(weights),), weights, **arguments)
        total: Tensor = sum(penalty.sum() for penalty in penalties) if penalties else 0 * weights.sum()
        return total
