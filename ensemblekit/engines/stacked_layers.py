"""A network of one member as a function of the stacked parameters of K members: (B, …) → (K, B, C).

Layers in a row (`nn.Sequential`) of the kinds below are computed for all members by one operation each. The rest is
given to `torch.func.vmap`, which can stack nearly everything, at a higher price for each operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from ensemblekit.members.stochastic import Dropout, stochastic_layers, uniform_numbers

Tensors = Mapping[str, Tensor]
"""Parameters and buffers by name, each (K, …)."""
ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Hardswish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Identity,
)


class StackedNetwork:
    """Computes K members at once. Its layers follow the `training` flag of the skeleton's layers."""

    def __init__(self, skeleton: nn.Module) -> None:
        self.layers: list[StackedLayer] = []
        for name, layer in _leaves(skeleton, ""):
            part = _stacked_layer(name, layer)
            if part is not None:
                self.layers.append(part)
            elif self.layers and isinstance(last := self.layers[-1], VmappedLayers) and last.accepts(layer):
                last.add(name, layer)
            else:
                self.layers.append(VmappedLayers(name, layer))

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool = True) -> Tensor:
        """Compute outputs (K, B, C) for inputs (B, …), or, if they are not shared, for (K, B, …) of each member."""
        for layer in self.layers:
            inputs = layer(tensors, inputs, shared)
            shared = shared and not layer.stacks
        return inputs

    def split_at_first_stochastic(self) -> tuple[StackedNetwork, StackedNetwork]:
        """Return the layers before the first stochastic one, and the rest."""
        first = next((index for index, layer in enumerate(self.layers) if layer.stochastic), len(self.layers))
        deterministic, stochastic = copy(self), copy(self)
        deterministic.layers, stochastic.layers = self.layers[:first], self.layers[first:]
        return deterministic, stochastic

    @property
    def stacks(self) -> bool:
        """Whether outputs are (K, B, …) where inputs are (B, …) for all members."""
        return any(layer.stacks for layer in self.layers)

    def vmapped_layers(self) -> list[str]:
        """Return the kinds of layers that `torch.func.vmap` computes."""
        layers = [layer for part in self.layers if isinstance(part, VmappedLayers) for layer in part.layers.values()]
        return list(dict.fromkeys(type(layer).__name__.lstrip("_") for layer in layers))


def _leaves(network: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a network in the order in which they run, as far as that is known, with their names."""
    if type(network) is not nn.Sequential or network._forward_hooks or network._forward_pre_hooks:
        yield name, network
        return
    for child, layer in network.named_children():
        yield from _leaves(layer, f"{name}.{child}".lstrip("."))


def _stacked_layer(name: str, layer: nn.Module) -> StackedLayer | None:
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None
    if type(layer) in ELEMENTWISE:
        return StackedElementwise(layer)
    if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
        return StackedFlatten()
    if type(layer) is nn.Linear:
        return StackedLinear(name, layer)
    if type(layer) is Dropout:
        return StackedDropout(name, layer)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d):
        has_statistics = layer.track_running_stats and layer.momentum is not None
        return StackedBatchNorm(name, layer) if has_statistics else None
    return None


class StackedLayer(ABC):
    """(tensors, inputs, shared) → outputs; inputs are (B, …) for all members if `shared`, else (K, B, …)."""

    stacks: ClassVar[bool] = True
    """Whether outputs are (K, B, …) whatever the inputs are."""
    stochastic: bool = False
    """Whether it may sample random numbers."""

    @abstractmethod
    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor: ...


class StackedElementwise(StackedLayer):
    """An activation."""

    stacks = False

    def __init__(self, layer: nn.Module) -> None:
        # Not in place: that would overwrite the batch itself, and on the views that layers pass to each other here
        # autograd would copy the gradient back and forth.
        self.layer = copy(layer)
        vars(self.layer)["inplace"] = False

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


class StackedFlatten(StackedLayer):
    """Turns samples into vectors."""

    stacks = False

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor:
        return inputs.flatten(1 if shared else 2)


class StackedLinear(StackedLayer):
    """Weights times samples in columns: outputs (K, B, O) lie in memory as (K, O, B), which suits batch norm."""

    def __init__(self, name: str, layer: nn.Linear) -> None:
        self.weight = f"{name}.weight".lstrip(".")
        self.bias = f"{name}.bias".lstrip(".") if layer.bias is not None else None

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor:
        weight = tensors[self.weight]
        num_members, num_outputs = weight.shape[:2]
        samples = inputs.flatten(0 if shared else 1, -2)
        columns = samples.transpose(-1, -2)
        if shared:  # one multiplication with the weights of all members
            weight = weight.flatten(0, 1)
        if self.bias is None:
            products = weight @ columns
        else:
            bias = tensors[self.bias].view(*weight.shape[:-1], 1)
            products = torch.addmm(bias, weight, columns) if shared else torch.baddbmm(bias, weight, columns)
        outputs = products.view(num_members, num_outputs, -1).transpose(1, 2)
        return outputs.unflatten(1, inputs.shape[0 if shared else 1 : -1])


class StackedBatchNorm(StackedLayer):
    """The channels of all members as those of one batch norm."""

    def __init__(self, name: str, layer: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        self.layer = layer
        self.names = [f"{name}.{part}".lstrip(".") for part in ("running_mean", "running_var", "weight", "bias")]
        self.counter = f"{name}.num_batches_tracked".lstrip(".")

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor:
        count = tensors[self.counter]
        if shared:
            inputs = inputs.expand(len(count), *inputs.shape)
        if self.layer.training:
            count.add_(1)
        num_members, _, num_channels = inputs.shape[:3]
        if inputs.ndim == 3:  # a batch of vectors as one row of pixels in each channel
            rows = inputs.transpose(1, 2).flatten(0, 1).unsqueeze(0)
            learning = self.layer.training and rows.shape[2] > 1
            outputs = self.rows(tensors)(rows)[0] if learning else self._normalised(tensors, rows)
            return outputs.view(num_members, num_channels, -1).transpose(1, 2)
        outputs = self._normalised(tensors, inputs.transpose(0, 1).flatten(1, 2))
        return outputs.unflatten(1, (num_members, num_channels)).transpose(0, 1)

    def rows(self, tensors: Tensors) -> NormalisedRows:
        """Return what normalises the channels of all members as rows."""
        mean, variance, weight, bias = (tensors[name].view(-1) if name in tensors else None for name in self.names)
        assert mean is not None
        assert variance is not None
        assert self.layer.momentum is not None
        return NormalisedRows(mean.view(1, -1), variance.view(1, -1), weight, bias, self.layer.eps, self.layer.momentum)

    def _normalised(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        mean, variance, weight, bias = (tensors[name].view(-1) if name in tensors else None for name in self.names)
        training, eps = self.layer.training, self.layer.eps
        momentum = 0.0 if self.layer.momentum is None else self.layer.momentum
        return functional.batch_norm(inputs, mean, variance, weight, bias, training, momentum, eps)


@dataclass(frozen=True)
class NormalisedRows:
    """Normalises (1, K * C, B) in training, as a group norm of one channel each: twice as fast as batch_norm."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    momentum: float

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, and the means and the inverse standard deviations of the rows; updates the statistics."""
        _, num_channels, batch = rows.shape
        outputs, means, inverse_deviations = torch.native_group_norm(
            rows, self.weight, self.bias, 1, num_channels, batch, num_channels, self.eps
        )
        with torch.no_grad():
            variances = inverse_deviations.pow(-2).sub_(self.eps).mul_(batch / (batch - 1))
            self.mean.lerp_(means, self.momentum)
            self.variance.lerp_(variances, self.momentum)
        return outputs, means, inverse_deviations


class StackedDropout(StackedLayer):
    """Dropout with random numbers of each member's own."""

    stochastic = True

    def __init__(self, name: str, layer: Dropout) -> None:
        self.layer = layer
        self.key, self.step = (f"{name}.{part}".lstrip(".") for part in ("noise_key", "noise_step"))

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor:
        key = tensors[self.key]
        if shared:
            inputs = inputs.expand(len(key), *inputs.shape)
        if not self.layer.draws or self.layer.p == 0:
            return inputs
        for_all_samples = self.layer.in_stochastic_pass
        shape = inputs.shape[2 if for_all_samples else 1 :]
        numbers = uniform_numbers(key, tensors[self.step] + self.layer.calls, shape)
        numbers = numbers.unsqueeze(1) if for_all_samples else numbers
        self.layer.calls += 1
        return torch.where(numbers >= self.layer.p, inputs / (1 - self.layer.p), 0)


class VmappedLayers(StackedLayer):
    """Consecutive layers of other kinds, stacked by `torch.func.vmap`."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.layers: dict[str, nn.Module] = {}
        self.add(name, layer)
        self.call = {
            shared: vmap(self._one, in_dims=(0, None if shared else 0), randomness="different")
            for shared in (True, False)
        }

    def accepts(self, layer: nn.Module) -> bool:
        """Whether a further layer may be added; a stochastic layer starts a part, so that passes can start there."""
        return self.stochastic or not stochastic_layers(layer)

    def add(self, name: str, layer: nn.Module) -> None:
        """Add a layer after the others."""
        self.layers[f"{name}." if name else ""] = layer
        self.stochastic = self.stochastic or bool(stochastic_layers(layer))

    def __call__(self, tensors: Tensors, inputs: Tensor, shared: bool) -> Tensor:
        selected = {key: value for key, value in tensors.items() if key.startswith(tuple(self.layers))}
        if shared and not selected:
            num_members = len(next(iter(tensors.values())))
            inputs, shared = inputs.expand(num_members, *inputs.shape), False
        return self.call[shared](selected, inputs)

    def _one(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        for prefix, layer in self.layers.items():
            selected = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            inputs = functional_call(layer, selected, (inputs,))
        return inputs
