"""Numerical differentiation that holds still what a method holds still on purpose.

A stop-gradient makes the numerical derivative of an objective differ from the analytical one, and rightly so. Here
the values that were taken out of the graph at the base point (by `detach`, `.data` or under `no_grad`) are recorded
and given back, in the order of the calls, when the objective is computed at points nearby. So both derivatives mean
the same, and a method need not declare anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEP = 1e-6


class _HeldConstants(TorchFunctionMode):
    """Records what leaves the graph in the first pass, and gives it back in passes after `replay`."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Any] = []
        self.position: int | None = None

    def replay(self) -> None:
        self.position = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (_takes_out_of_graph(func) or not torch.is_grad_enabled()) or not _holds_tensors(result):
            return result
        if self.position is None:
            self.recorded.append(_copy(result))
            return result
        self.position += 1
        if self.position > len(self.recorded):
            return result
        return _copy(self.recorded[self.position - 1])


def derivatives(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a scalar function at a float64 point, by autograd and by central differences."""
    constants = _HeldConstants()
    leaf = at.clone().requires_grad_()
    with constants:
        value = function(leaf)
    analytical = torch.zeros_like(at)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
        analytical = analytical if gradient is None else gradient
    numerical = torch.empty_like(at)
    for place in range(at.numel()):
        ends = []
        for step in (STEP, -STEP):
            moved = at.clone()
            moved.view(-1)[place] += step
            moved.requires_grad_()  # so that the same values leave the graph
            constants.replay()
            with constants:
                ends.append(function(moved))
        numerical.view(-1)[place] = ((ends[0] - ends[1]) / (2 * STEP)).detach()
    return analytical, numerical


def _takes_out_of_graph(func: Callable[..., Any]) -> bool:
    return func in (Tensor.detach, Tensor.detach_, torch.detach) or func == Tensor.data.__get__  # type: ignore[attr-defined]


def _holds_tensors(result: Any) -> bool:
    parts = result if isinstance(result, tuple) else (result,)
    # those of torch.func belong to a derivative that is over when they would be given back
    return all(isinstance(part, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(part) for part in parts)


def _copy(result: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)([part.clone() for part in result])
    return result.clone()
