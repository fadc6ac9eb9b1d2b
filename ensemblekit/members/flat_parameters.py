"""All parameters of a network in one flat tensor, so that an optimizer does its work once and not for each of them.

An optimizer that treats every element alike computes the same numbers on the flat tensor, with a fraction of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemblekit.engines.base import COUNTERS, OptimizerState, Settings


class Layout:
    """Where tensors of given shapes lie within a flat one; each keeps its order in memory, such as channels_last."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.orders = {name: _dimensions_in_memory(tensor) for name, tensor in tensors.items()}
        self.sizes = [tensor.numel() for tensor in tensors.values()]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new flat tensor of tensors that are given in the layout's order."""
        pairs = zip(tensors, self.orders.values(), strict=True)
        return torch.cat([(tensor.permute(order) if order else tensor).reshape(-1) for tensor, order in pairs])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor, each in its own shape."""
        views = {}
        for (name, shape), part in zip(self.shapes.items(), flat.split(self.sizes), strict=True):
            if order := self.orders[name]:
                back = sorted(range(len(order)), key=order.__getitem__)
                views[name] = part.view([shape[dimension] for dimension in order]).permute(back)
            else:
                views[name] = part.view(shape)
        return views


class Parameters:
    """The parameters that an optimizer changes, by name; `tensors` are views of one flat tensor if that can be."""

    def __init__(self, tensors: Mapping[str, Tensor], settings: Settings) -> None:
        self.clip_norm = settings.clip_norm
        self.layout: Layout | None = None
        values = [tensor.detach() for tensor in tensors.values()]
        if settings.elementwise and len({value.dtype for value in values}) == 1:
            self.layout = Layout(tensors)
            values = [self.layout.join(values)]
        self.tensors = self.layout.split(values[0]) if self.layout else dict(zip(tensors, values, strict=True))
        self.optimized = [value.detach().requires_grad_() for value in values]
        """What the optimizer sees: the flat tensor, or each parameter."""
        self.optimizer = settings.build_optimizer(self.optimized)

    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """One step with the gradients of the tensors, in their order."""
        joined = [self.layout.join(gradients)] if self.layout else gradients
        for value, gradient in zip(self.optimized, joined, strict=True):
            value.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> OptimizerState:
        """What the optimizer keeps of each parameter; nothing before the first step."""
        states: list[dict[str, Any]] = [self.optimizer.state.get(value, {}) for value in self.optimized]
        if not self.layout:
            return {name: dict(state) for name, state in zip(self.tensors, states, strict=True) if state}
        parts = {
            key: dict.fromkeys(self.tensors, value) if key in COUNTERS else self.layout.split(value)
            for key, value in states[0].items()
        }
        return {name: {key: values[name] for key, values in parts.items()} for name in self.tensors} if parts else {}

    def load_state(self, state: OptimizerState) -> None:
        """Take over what `state` gave; nothing if that is empty."""
        if not state:
            return
        states = [state[name] for name in self.tensors]
        device = self.optimized[0].device
        for value, own in zip(self.optimized, states, strict=self.layout is None):
            loaded = {}
            for key, kept in own.items():
                if not isinstance(kept, Tensor):
                    loaded[key] = kept
                elif key in COUNTERS:
                    loaded[key] = kept.clone()  # changed in place, and others may hold it too
                elif self.layout:
                    loaded[key] = self.layout.join([each[key].to(device) for each in states])
                else:
                    loaded[key] = kept.to(device, copy=True)
            self.optimizer.state[value] = loaded


def clipped(gradients: Sequence[Tensor], largest: float | None) -> Sequence[Tensor]:
    """Gradients (K, …) of K members, those of each scaled to a norm of at most `largest` in all."""
    if largest is None:
        return gradients
    norms = torch.stack([gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (largest / (norms + 1e-6)).clamp_max(1)  # as torch.nn.utils.clip_grad_norm_ does
    return [gradient * scale.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]


def _dimensions_in_memory(tensor: Tensor) -> list[int]:
    """The dimensions from the one with the longest stride to that with the shortest; empty if that is their order.

    Where a dimension of size 1 makes that ambiguous, the strides stay what they are: convolutions choose by them.
    """
    given = list(range(tensor.ndim))
    order = sorted(given, key=lambda dimension: (-tensor.stride()[dimension], -tensor.shape[dimension]))
    return [] if order == given else order
