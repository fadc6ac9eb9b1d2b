"""Gradients by autograd and by central differences, for objectives with stop-gradients.

A stop-gradient makes the numerical gradient of an objective differ from the analytical one, and rightly so: autograd
treats the detached values as constants, while a finite difference lets them move. Therefore the values that leave the
graph at the base point (by `detach`, by `.data` or under `no_grad`) are recorded, and returned in the same order when
the objective is computed at the points nearby. Both gradients then mean the same, and methods declare nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEP = 1e-6
"""Step of the central difference in float64."""


class _FrozenConstants(TorchFunctionMode):
    """Records the values that leave the graph in the first evaluation, and returns them in those after `replay`."""

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
        if not (_detaches(func) or not torch.is_grad_enabled()) or not _holds_tensors(result):
            return result
        if self.position is None:
            self.recorded.append(_copy(result))
            return result
        self.position += 1
        if self.position > len(self.recorded):
            return result
        return _copy(self.recorded[self.position - 1])


def gradient_pair(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate a scalar function by autograd and by central differences.

    Args:
        function: Maps a tensor of the shape of `at` to a scalar.
        at: The point at which to differentiate, float64.

    Returns:
        The analytical and the numerical gradient, both of the shape of `at`.
    """
    constants = _FrozenConstants()
    leaf = at.clone().requires_grad_()
    with constants:
        value = function(leaf)
    analytical = torch.zeros_like(at)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
        analytical = analytical if gradient is None else gradient
    numerical = torch.empty_like(at)
    for index in range(at.numel()):
        ends = []
        for step in (STEP, -STEP):
            moved = at.clone()
            moved.view(-1)[index] += step
            moved.requires_grad_()  # so that the function takes the same path through autograd
            constants.replay()
            with constants:
                ends.append(function(moved))
        numerical.view(-1)[index] = ((ends[0] - ends[1]) / (2 * STEP)).detach()
    return analytical, numerical


def _detaches(func: Callable[..., Any]) -> bool:
    return func in (Tensor.detach, Tensor.detach_, torch.detach) or func == Tensor.data.__get__  # type: ignore[attr-defined]


def _holds_tensors(result: Any) -> bool:
    parts = result if isinstance(result, tuple) else (result,)
    # a tensor of torch.func belongs to one derivative and is invalid when it would be replayed
    return all(isinstance(part, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(part) for part in parts)


def _copy(result: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)([part.clone() for part in result])
    return result.clone()
