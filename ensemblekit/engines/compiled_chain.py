"""A chain of linear layers, batch norm and ReLU as compiled code: a call for the outputs, and one for the gradients.

It computes one member after the other, all layers of it, so that its values stay in the cache; several threads take
different members. So the bits of a result do not depend on the number of threads, and none waits for another one
within a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ensemblekit.core import kernels
from ensemblekit.engines.stacked_layers import (
    StackedBatchNorm,
    StackedElementwise,
    StackedFlatten,
    StackedLayer,
    StackedLinear,
    StackedNetwork,
    Tensors,
)

WIDEST = 512
"""Products with wider layers are left to torch, whose code for them is faster."""
FLOPS_FOR_THREADS = 4e7
"""A pass of less work is computed by one thread: others would take as long to wake up."""


def compiled_chain(network: StackedNetwork, tensors: Tensors, gradients: Tensors) -> CompiledChain | None:
    """Return the chain of a network of linear layers, each with batch norm and ReLU after it where it has them.

    Args:
        network: the stacked network.
        tensors: its parameters and buffers, each (K, …).
        gradients: where to write the gradients of those parameters that are learned.

    Returns:
        None for all other networks, and where there is no compiled code.
    """
    blocks: list[Block] = []
    for layer in network.layers:
        if isinstance(layer, StackedLinear):
            blocks.append(Block(layer))
        elif isinstance(layer, StackedFlatten):
            if blocks:
                continue
        elif not blocks or not blocks[-1].add(layer):
            return None
    floats = [value for value in tensors.values() if value.dtype != torch.int64]
    shapes = [tensors[block.linear.weight].shape for block in blocks]
    if not blocks or max(max(shape[1:]) for shape in shapes) > WIDEST or not kernels.accept(*floats):
        return None
    return CompiledChain(blocks, tensors, gradients, isinstance(network.layers[0], StackedFlatten))


class CompiledChain:
    """The layers of a network with stacked parameters; use `compiled_chain` to make one."""

    def __init__(self, blocks: Sequence[Block], tensors: Tensors, gradients: Tensors, flattens: bool) -> None:
        self.blocks, self.tensors, self.gradients, self.flattens = blocks, tensors, gradients, flattens
        self.num_members, _, self.num_inputs = tensors[blocks[0].linear.weight].shape
        self.num_threads = torch.get_num_threads()
        self.memories: dict[int, Memory] = {}
        """By the size of the batch."""
        self.memory: Memory | None = None
        """That of the last batch."""

    def accepts(self, inputs: Tensor, shared: bool) -> bool:
        """Return whether inputs are vectors; and at least two of them, because batch norm needs a variance."""
        dimension = 0 if shared else 1
        is_vector = self.flattens or inputs.ndim == dimension + 2
        return is_vector and inputs.dtype == torch.float32 and inputs.shape[dimension] > 1

    def forward(self, inputs: Tensor, shared: bool) -> Tensor:
        """Compute outputs (K, B, C) in training mode, for inputs (B, …), or (K, B, …) if they are not shared."""
        batch = inputs.shape[0 if shared else 1]
        if batch not in self.memories:
            self.memories[batch] = Memory(self, batch)
        self.memory = memory = self.memories[batch]
        memory.set_inputs(inputs.detach().reshape(-1, self.num_inputs).contiguous(), shared)
        kernels.compute_forward(memory.plan, memory.num_threads)
        return memory.outputs

    def backward(self, gradient: Tensor) -> None:
        """Compute the gradients of all parameters from that of the last outputs (K, B, C)."""
        assert self.memory is not None
        gradient = gradient.contiguous()
        self.memory.plan.gradient = gradient.data_ptr()
        kernels.compute_backward(self.memory.plan, self.memory.num_threads)


class Block:
    """A linear layer, and what follows it."""

    def __init__(self, linear: StackedLinear) -> None:
        self.linear = linear
        self.norm: StackedBatchNorm | None = None
        self.has_relu = False

    def add(self, layer: StackedLayer) -> bool:
        """Take a further layer, if it can be the next one here."""
        if self.has_relu:
            return False
        if isinstance(layer, StackedElementwise) and isinstance(layer.layer, nn.ReLU):
            self.has_relu = True
            return True
        if isinstance(layer, StackedBatchNorm) and isinstance(layer.layer, nn.BatchNorm1d) and self.norm is None:
            self.norm = layer
            return True
        return False


class Memory:
    """What the compiled code reads and writes for batches of one size: tensors, and the tables of pointers to them."""

    def __init__(self, chain: CompiledChain, batch: int) -> None:
        self.num_members, self.batch = chain.num_members, batch
        self.kept: list[Tensor] = []
        """Those to which only pointers refer."""
        self.layers = (kernels.Layer * len(chain.blocks))(*(self._layer(block, chain) for block in chain.blocks))
        widest = max(max(layer.inputs, layer.outputs) for layer in self.layers)
        flops = 2 * batch * self.num_members * sum(layer.inputs * layer.outputs for layer in self.layers)
        self.num_threads = chain.num_threads if flops >= FLOPS_FOR_THREADS else 1
        scratch = self._pointer(self.num_threads, kernels.scratch_size(widest, batch))
        size = (len(self.layers), self.num_members, batch)
        self.plan = kernels.Pass(self.layers, *size, widest=widest, scratch=scratch)
        self.inputs = self.outputs = torch.empty(0)

    def _pointer(self, *shape: int) -> int:
        self.kept.append(torch.empty(shape))
        return self.kept[-1].data_ptr()

    def _layer(self, block: Block, chain: CompiledChain) -> kernels.Layer:
        _, num_outputs, num_inputs = chain.tensors[block.linear.weight].shape
        layer = kernels.Layer(num_inputs, num_outputs, has_relu=block.has_relu)
        layer.kept = self._pointer(self.num_members, self.batch, num_outputs)
        names = {"weight": block.linear.weight, "bias": block.linear.bias}
        if (norm := block.norm) is not None:
            layer.has_norm, layer.eps, layer.momentum = 1, norm.layer.eps, norm.layer.momentum
            layer.inverse = self._pointer(self.num_members, num_outputs)
            names |= dict(zip(("mean", "variance", "scale", "shift"), norm.names, strict=True))
            names["counter"] = norm.counter
        for field, name in names.items():
            if name in chain.tensors:
                setattr(layer, field, chain.tensors[name].data_ptr())
            if name in chain.gradients:
                setattr(layer, f"{field}_gradient", chain.gradients[name].data_ptr())
        return layer

    def set_inputs(self, inputs: Tensor, shared: bool) -> None:
        """Set the inputs, (B, …) or (K * B, …), and new memory for the outputs, which others may keep."""
        self.inputs = inputs  # until the gradients are computed
        self.outputs = torch.empty(self.num_members, self.batch, int(self.layers[-1].outputs))
        self.plan.inputs, self.plan.input_stride = inputs.data_ptr(), 0 if shared else self.batch * inputs.shape[1]
        self.plan.outputs = self.outputs.data_ptr()
        if not self.layers[-1].has_norm:
            self.layers[-1].kept = self.plan.outputs
