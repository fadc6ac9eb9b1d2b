"""All parameters of a network in one flat tensor, so that an optimizer makes one update instead of one per parameter.

An optimizer that updates every element independently computes the same numbers on the flat tensor, with a fraction of
the calls: for small networks those calls are most of a step. Other optimizers get every parameter by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemblekit.members.state import OptimizerState
from ensemblekit.spec.optimizers import AnyOptimizer


class Layout:
    """Where tensors lie within a flat one; each keeps its memory format, such as channels_last."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.orders = {name: _memory_order(tensor) for name, tensor in tensors.items()}
        self.sizes = [tensor.numel() for tensor in tensors.values()]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy tensors, in the order of the layout, to a new flat tensor."""
        pairs = zip(tensors, self.orders.values(), strict=True)
        return torch.cat([(tensor.permute(order) if order else tensor).reshape(-1) for tensor, order in pairs])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat tensor, each in its own shape and memory format."""
        views = {}
        for (name, shape), part in zip(self.shapes.items(), flat.split(self.sizes), strict=True):
            if order := self.orders[name]:
                inverse = sorted(range(len(order)), key=order.__getitem__)
                views[name] = part.view([shape[dimension] for dimension in order]).permute(inverse)
            else:
                views[name] = part.view(shape)
        return views


class FlatParameters:
    """Parameters by name with their optimizer; `tensors` are views of one flat tensor where the optimizer allows it."""

    def __init__(self, tensors: Mapping[str, Tensor], optimizer: AnyOptimizer) -> None:
        self.layout: Layout | None = None
        values = [tensor.detach() for tensor in tensors.values()]
        if optimizer.elementwise and len({value.dtype for value in values}) == 1:
            self.layout = Layout(tensors)
            values = [self.layout.join(values)]
        self.tensors = self.layout.split(values[0]) if self.layout else dict(zip(tensors, values, strict=True))
        self.optimized = [value.detach().requires_grad_() for value in values]
        """The tensors that the optimizer sees: the flat one, or each parameter."""
        self.optimizer = optimizer.build(self.optimized)
        self.per_tensor = optimizer.per_tensor_state
        self.flat_gradient: Tensor | None = None
        self.gradient_views: list[Tensor] = []

    def gradients(self) -> dict[str, Tensor] | None:
        """Return memory for the gradients, by name, that `step` need not copy; None if there is no flat tensor.

        A step with `gradient_views` uses what was written there.
        """
        if self.layout is None:
            return None
        self.flat_gradient = torch.zeros_like(self.optimized[0], requires_grad=False)
        views = self.layout.split(self.flat_gradient)
        self.gradient_views = list(views.values())
        return views

    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """Take one step with the gradients of the tensors, in their order."""
        if gradients is self.gradient_views and self.flat_gradient is not None:
            joined: Sequence[Tensor] = [self.flat_gradient]
        else:
            joined = [self.layout.join(gradients)] if self.layout else gradients
        for value, gradient in zip(self.optimized, joined, strict=True):
            value.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for value in self.optimized:
            value.grad = None

    def state(self) -> OptimizerState:
        """Return the optimizer's state of each parameter; empty before the first step."""
        states: list[dict[str, Any]] = [self.optimizer.state.get(value, {}) for value in self.optimized]
        if not self.layout:
            return {name: dict(state) for name, state in zip(self.tensors, states, strict=True) if state}
        parts = {
            key: dict.fromkeys(self.tensors, value)
            if is_shared(key, value, self.per_tensor)
            else self.layout.split(value)
            for key, value in states[0].items()
        }
        return {name: {key: values[name] for key, values in parts.items()} for name in self.tensors} if parts else {}

    def load_state(self, state: OptimizerState) -> None:
        """Restore what `state` returned; an empty state changes nothing."""
        if not state:
            return
        states = [state[name] for name in self.tensors]
        for value, first in zip(self.optimized, states, strict=self.layout is None):
            self.optimizer.state[value] = {key: self._loaded(key, first, states) for key in first}

    def _loaded(self, key: str, state: dict[str, Any], states: Sequence[dict[str, Any]]) -> Any:
        value, device = state[key], self.optimized[0].device
        if not isinstance(value, Tensor):
            return value
        if key in self.per_tensor:
            return value.clone()  # it is changed in place, and other members may hold it too
        if self.layout:
            return self.layout.join([each[key].to(device) for each in states])
        return value.to(device, copy=True)


def flat_weights(tensors: Sequence[Tensor]) -> Tensor:
    """Copy parameters (K, …) of K members to one tensor (K, P)."""
    return torch.cat([tensor.detach().reshape(len(tensor), -1) for tensor in tensors], dim=1)


def split_weights(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of (K, P) that belong to parameters (K, …), in their shapes: the inverse of `flat_weights`."""
    parts = flat.split([tensor[0].numel() for tensor in tensors], dim=1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def is_shared(key: str, value: Any, per_tensor: frozenset[str]) -> bool:
    """Return whether an optimizer keeps a part of its state once per tensor: a plain number, or what it declares."""
    return key in per_tensor or not isinstance(value, Tensor)


def clip_per_member(gradients: Sequence[Tensor], max_norm: float | None) -> Sequence[Tensor]:
    """Scale gradients (K, …) of K members so that the norm of each member's gradient is at most `max_norm`."""
    if max_norm is None:
        return gradients
    norms = torch.stack([gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (max_norm / (norms + 1e-6)).clamp_max(1)  # as torch.nn.utils.clip_grad_norm_ does
    return [gradient * scale.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the longest stride to the shortest; empty if that is their natural order.

    Where a dimension of size 1 makes that ambiguous, the strides are kept: convolutions choose their kernel by them.
    """
    natural = list(range(tensor.ndim))
    order = sorted(natural, key=lambda dimension: (-tensor.stride()[dimension], -tensor.shape[dimension]))
    return [] if order == natural else order
