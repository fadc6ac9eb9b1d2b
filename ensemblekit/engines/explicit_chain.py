"""A chain of stacked layers whose gradients are computed by their formulas, without autograd.

For tiny members, building and walking autograd's graph takes as long as the arithmetic. Here every layer keeps what its
gradient needs and writes the gradients of its parameters to the memory from which the optimizer reads them.
Activations are (K, C, B): the samples of each channel lie side by side, which suits batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ensemblekit.engines.stacked_layers import (
    StackedBatchNorm,
    StackedDropout,
    StackedElementwise,
    StackedFlatten,
    StackedLayer,
    StackedLinear,
    StackedNetwork,
    Tensors,
)


class ExplicitLayer(Protocol):
    """Computes columns (K, C, B) from columns, and gradients from gradients, in turn."""

    def forward(self, columns: Tensor) -> Tensor:
        """Compute the outputs in training mode."""

    def backward(self, gradient: Tensor, is_first: bool) -> Tensor:
        """Write the gradients of the parameters; returns that of the inputs, unless the layer is the first one."""


class ExplicitChain:
    """The layers of a network with stacked parameters; use `explicit_chain` to make one."""

    def __init__(self, layers: Sequence[ExplicitLayer], flattens: bool) -> None:
        self.layers, self.flattens = layers, flattens

    def accepts(self, inputs: Tensor, shared: bool) -> bool:
        """Return whether inputs are vectors; and at least two of them, because batch norm needs a variance."""
        dimension = 0 if shared else 1
        return (self.flattens or inputs.ndim == dimension + 2) and inputs.shape[dimension] > 1

    def forward(self, inputs: Tensor, shared: bool) -> Tensor:
        """Compute outputs (K, B, C) in training mode, for inputs (B, …), or (K, B, …) if they are not shared."""
        columns = inputs.flatten(1 if shared else 2).transpose(-1, -2)
        with torch.no_grad():
            for layer in self.layers:
                columns = layer.forward(columns)
        return columns.transpose(1, 2)

    def backward(self, gradient: Tensor) -> None:
        """Compute the gradients of all parameters from that of the last outputs (K, B, C)."""
        columns = gradient.transpose(1, 2)
        with torch.no_grad():
            for index in reversed(range(len(self.layers))):
                columns = self.layers[index].backward(columns, is_first=index == 0)


def explicit_chain(network: StackedNetwork, tensors: Tensors, gradients: Tensors) -> ExplicitChain | None:
    """Return the chain of a network that begins with a linear layer and has only layers that are known here.

    Args:
        network: the stacked network.
        tensors: its parameters and buffers, each (K, …).
        gradients: where to write the gradients of those parameters that are learned.

    Returns:
        None for all other networks.
    """
    layers: list[ExplicitLayer] = []
    stacked = [layer for layer in network.layers if not isinstance(layer, StackedFlatten)]
    if not stacked or not isinstance(stacked[0], StackedLinear):
        return None
    for layer in stacked:
        if isinstance(layer, StackedLinear):
            layers.append(_Linear(layer, tensors, gradients))
        elif isinstance(layer, StackedBatchNorm) and isinstance(layer.layer, nn.BatchNorm1d):
            layers.append(_BatchNorm(layer, tensors, gradients))
        elif isinstance(layer, StackedElementwise) and isinstance(layer.layer, nn.ReLU):
            layers.append(_ReLU(in_place=isinstance(layers[-1], _Linear | _BatchNorm)))
        elif isinstance(layer, StackedElementwise | StackedDropout):
            layers.append(_Differentiated(layer, tensors))
        else:
            return None
    return ExplicitChain(layers, isinstance(network.layers[0], StackedFlatten))


class _Linear:
    def __init__(self, layer: StackedLinear, tensors: Tensors, gradients: Tensors) -> None:
        # all views are made once: each one costs as much as a tenth of a small multiplication
        self.weight = tensors[layer.weight].detach()
        self.transposed = self.weight.transpose(1, 2)
        self.rows = self.weight.flatten(0, 1)
        self.bias = None if layer.bias is None else tensors[layer.bias].detach().unsqueeze(-1)
        self.bias_rows = None if self.bias is None else self.bias.flatten(0, 1)
        self.weight_gradient = gradients.get(layer.weight)
        self.row_gradient = None if self.weight_gradient is None else self.weight_gradient.flatten(0, 1)
        self.bias_gradient = None if layer.bias is None else gradients.get(layer.bias)
        self.inputs: Tensor | None = None

    def forward(self, columns: Tensor) -> Tensor:
        self.inputs = columns
        if columns.ndim == 3:
            return self.weight @ columns if self.bias is None else torch.baddbmm(self.bias, self.weight, columns)
        # inputs that all members share: one multiplication with the weights of all of them
        rows = self.rows @ columns if self.bias_rows is None else torch.addmm(self.bias_rows, self.rows, columns)
        return rows.view(*self.weight.shape[:2], -1)

    def backward(self, gradient: Tensor, is_first: bool) -> Tensor:
        inputs, self.inputs = self.inputs, None
        assert inputs is not None
        if self.row_gradient is not None and inputs.ndim == 2:
            torch.mm(gradient.flatten(0, 1), inputs.T, out=self.row_gradient)
        elif self.weight_gradient is not None:
            torch.bmm(gradient, inputs.transpose(1, 2), out=self.weight_gradient)
        if self.bias_gradient is not None:
            torch.sum(gradient, dim=2, out=self.bias_gradient)
        return gradient if is_first else torch.bmm(self.transposed, gradient)


class _BatchNorm:
    """The channels of all members as rows that are normalised like groups of one channel."""

    def __init__(self, layer: StackedBatchNorm, tensors: Tensors, gradients: Tensors) -> None:
        self.normalise = layer.rows({name: value.detach() for name, value in tensors.items()})
        self.counter = tensors[layer.counter]
        self.gradients = [gradients[name].view(-1) if name in gradients else None for name in layer.names[2:]]
        self.wanted = [True, *(each is not None for each in self.gradients)]
        self.saved: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, columns: Tensor) -> Tensor:
        self.counter.add_(1)
        rows = columns.reshape(1, -1, columns.shape[-1])
        outputs, means, inverse_deviations = self.normalise(rows)
        self.saved = rows, means, inverse_deviations
        return outputs.view(columns.shape)

    def backward(self, gradient: Tensor, is_first: bool) -> Tensor:
        assert self.saved is not None
        (rows, means, inverse_deviations), self.saved = self.saved, None
        _, count, batch = rows.shape
        slopes, weight = gradient.reshape(rows.shape), self.normalise.weight
        inputs, *parameters = torch.ops.aten.native_group_norm_backward(
            slopes, rows, means, inverse_deviations, weight, 1, count, batch, count, self.wanted
        )
        for place, value in zip(self.gradients, parameters, strict=True):
            if place is not None:
                place.copy_(value)
        return inputs.view(gradient.shape)


class _ReLU:
    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        """Whether the layer before does not need its outputs for its gradient."""
        self.outputs: Tensor | None = None

    def forward(self, columns: Tensor) -> Tensor:
        self.outputs = columns.relu_() if self.in_place else columns.relu()
        return self.outputs

    def backward(self, gradient: Tensor, is_first: bool) -> Tensor:
        outputs, self.outputs = self.outputs, None
        return torch.ops.aten.threshold_backward(gradient, outputs, 0)


class _Differentiated:
    """A layer without parameters whose gradient autograd computes: other activations, and dropout."""

    def __init__(self, layer: StackedLayer, tensors: Tensors) -> None:
        self.layer, self.tensors = layer, tensors
        self.saved: tuple[Tensor, Tensor] | None = None

    def forward(self, columns: Tensor) -> Tensor:
        inputs = columns.transpose(1, 2).detach().requires_grad_()
        with torch.enable_grad():
            outputs = self.layer(self.tensors, inputs, shared=False)
        self.saved = inputs, outputs
        return outputs.detach().transpose(1, 2).contiguous()

    def backward(self, gradient: Tensor, is_first: bool) -> Tensor:
        assert self.saved is not None
        (inputs, outputs), self.saved = self.saved, None
        (slope,) = torch.autograd.grad(outputs, inputs, gradient.transpose(1, 2))
        return slope.transpose(1, 2).contiguous()
