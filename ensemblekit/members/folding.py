"""Copies of members for inference: batch norm folded into the layer before it, channels_last, small chunks of samples.

Folding is exact up to rounding. It is done only where it is certainly valid: for a convolution or linear layer and
the batch norm that follows it directly in the same `nn.Sequential`. Poolings stay bit-identical.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ensemblekit.members.stochastic import outputs_of_passes

CHUNK_BYTES = 2**18
"""Size of the chunks of a batch: small enough that the activations between two layers stay in the cache."""
MIN_CHUNK_SAMPLES = 8
_BATCH_NORMS = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.Linear: nn.BatchNorm1d,
}


def folded(network: nn.Module) -> tuple[nn.Module, int]:
    """Return a copy for inference with batch norms folded into the layers before them, and how many were folded.

    Max-poolings of 2 × 2 no longer compute the indices of the maxima, which only training needs.
    """
    network, count = with_folded_norms(network)
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if _is_pool_of_two(layer):
                setattr(parent, name, MaxPoolWithoutIndices())
    return network, count


def with_folded_norms(network: nn.Module) -> tuple[nn.Module, int]:
    """Return a copy in evaluation mode with batch norms folded, and how many were folded; other layers stay."""
    network = deepcopy(network).eval().requires_grad_(False)
    uses = Counter(id(layer) for _, layer in network.named_modules(remove_duplicate=False))
    count = 0
    for sequence in list(network.modules()):
        if type(sequence).forward is not nn.Sequential.forward:
            continue
        for (name, layer), (following, norm) in pairwise(list(sequence.named_children())):
            if _foldable(layer, norm) and uses[id(layer)] == uses[id(norm)] == 1:
                setattr(sequence, name, _fold(layer, norm))
                setattr(sequence, following, nn.Identity())
                count += 1
    return network, count


class MaxPoolWithoutIndices(nn.Module):
    """`nn.MaxPool2d(2)` without the indices of the maxima: twice as fast on a CPU."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = (size // 2 * 2 for size in images.shape[-2:])
        images = images[..., :height, :width]
        rows = torch.maximum(images[..., ::2, :], images[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def _is_pool_of_two(layer: nn.Module) -> bool:
    if type(layer) is not nn.MaxPool2d or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    sizes = {layer.kernel_size, layer.stride} <= {2, (2, 2)}
    return sizes and (layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices) == (0, 1, False, False)


def _foldable(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether both are exactly of these classes, have no hooks, and the norm has running statistics."""
    if _BATCH_NORMS.get(type(layer)) is not type(norm):
        return False
    hooks = any((*part._forward_hooks, *part._forward_pre_hooks) for part in (layer, norm))
    return not hooks and getattr(norm, "running_mean", None) is not None


def _fold(layer: Any, norm: Any) -> nn.Module:
    fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    return fuse(layer, norm)


class FoldedMember:
    """A folded copy of a network with its current weights, which computes large batches in chunks."""

    def __init__(self, network: nn.Module, channels_last: bool) -> None:
        self.network, _ = folded(network)
        self.channels_last = channels_last
        if channels_last:
            self.network.to(memory_format=torch.channels_last)

    def __call__(self, inputs: Tensor, passes: int | None = None) -> Tensor:
        """Compute outputs (S, B, C) of S stochastic passes, or (1, B, C) of a deterministic one; without gradients.

        Those of a family are (S, K, B, C).
        """
        with torch.inference_mode():
            if self.channels_last and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            if inputs.device.type != "cpu":
                return outputs_of_passes(self.network, inputs, passes)
            sample_bytes = inputs[:1].numel() * inputs.element_size()
            chunks = inputs.split(max(MIN_CHUNK_SAMPLES, CHUNK_BYTES // max(1, sample_bytes)))
            return torch.cat([outputs_of_passes(self.network, chunk, passes) for chunk in chunks], dim=-2)
