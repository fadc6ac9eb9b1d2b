"""Refuses what hooks of the objective must not do with the outputs: change them in place, or call backward()."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from ensemblekit.core.errors import PluginError

if TYPE_CHECKING:
    from ensemblekit.core.objective import Objective

Compute = TypeVar("Compute", bound=Callable[..., Tensor])
HOOKS = ("combine", "member_loss", "select_members", "ensemble_loss")
MISUSES = {
    "changes the members' outputs in place, which falsifies their gradients": (
        "compute a new tensor: outputs * 2 instead of outputs.mul_(2)"
    ),
    "calls backward(), which frees what the step needs": (
        "return the losses, and the engine computes gradients; torch.func.grad computes one inside a hook"
    ),
}


def refuses_misuse(method: Compute) -> Compute:
    """Let a method of the objective that takes outputs raise a `PluginError` that names the hook that misuses them."""

    @wraps(method)
    def guarded(objective: Objective, outputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = _marks(outputs)
        try:
            result = method(objective, outputs, *args, **kwargs)
        except RuntimeError as error:  # torch refuses some of it itself
            if misuse := find_misuse(objective, outputs, _target(args, kwargs)):
                raise misuse from error
            raise
        if _marks(outputs) != before and (misuse := find_misuse(objective, outputs, _target(args, kwargs))):
            raise misuse
        return result

    return cast("Compute", guarded)


def _marks(outputs: Tensor) -> tuple[int, bool]:
    """What a misuse changes: the tensor's version, and whether a gradient was written to it."""
    version = 0 if outputs.is_inference() else outputs._version
    return version, outputs.is_leaf and outputs.grad is not None


def _target(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return kwargs["target"] if "target" in kwargs else next(iter(args), None)


def find_misuse(objective: Objective, outputs: Tensor, target: Tensor | None) -> PluginError | None:
    """Call each implementation by itself, on copies; returns the error for the first one that misuses them."""
    for hook in HOOKS:
        for implementation in getattr(objective.hooks.call, hook).get_hookimpls():
            leaf = outputs.detach().clone().requires_grad_()
            copy = leaf * 1  # torch does not refuse changes of a tensor that is not a leaf
            arguments = _arguments(objective, copy, target)
            with suppress(Exception), torch.enable_grad():
                implementation.function(*(arguments[name] for name in implementation.argnames))
            misuses = (copy._version != 0, leaf.grad is not None)
            for (what, fix), found in zip(MISUSES.items(), misuses, strict=True):
                if found:
                    name = implementation.plugin_name
                    what = f'plugin "{name}": hook "{hook}" {what}'
                    return PluginError(what, fix=fix, plugin=name, hook=hook)
    return None


def _arguments(objective: Objective, outputs: Tensor, target: Tensor | None) -> dict[str, Any]:
    """Return arguments of any hook of the objective; without `combine`, which may be the hook that is looked for."""
    arguments = objective.output_arguments(outputs, None, objective.layout)
    moment = {"epoch": 1, "num_epochs": 1, "progress": 0.0}
    return {**arguments, "combined": arguments["outputs"].mean(dim=0), "target": target, "fitted": None, **moment}
