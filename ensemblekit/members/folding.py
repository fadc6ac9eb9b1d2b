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

from ensemblekit.members.fused_layers import with_fused_layers
from ensemblekit.members.stochastic import outputs_of_passes, stochastic_layers

CHUNK_BYTES = 2**20
"""Size of the chunks of a batch: small enough that the activations between two layers stay in the shared cache, and
large enough that what each operation costs by itself does not count; measured best or near it for four networks."""
MIN_CHUNK_SAMPLES = 8
_BATCH_NORMS = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.Linear: nn.BatchNorm1d,
}


def folded(network: nn.Module, stochastic: bool = False) -> tuple[nn.Module, int]:
    """Return a copy for inference with batch norms folded into the layers before them, and how many were folded.

    Layers with a method `for_prediction() -> nn.Module | None` are replaced by what it returns: a layer that computes
    the same without gradients in evaluation mode, only faster. None: there is no such layer here. Max-poolings of 2 × 2
    no longer compute the indices of the maxima, which only training needs.

    Args:
        network: the network of a member.
        stochastic: whether the copy computes stochastic passes, for which stochastic layers stay as they are.
    """
    network = deepcopy(network).eval().requires_grad_(False)
    network = _own_prediction(network, stochastic) or network
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if (own := _own_prediction(layer, stochastic)) is not None:
                setattr(parent, name, own)
    count = _fold_norms(network)
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if _is_pool_of_two(layer):
                setattr(parent, name, MaxPoolWithoutIndices())
    return network, count


def with_folded_norms(network: nn.Module) -> tuple[nn.Module, int]:
    """Return a copy in evaluation mode with batch norms folded, and how many were folded; other layers stay."""
    network = deepcopy(network).eval().requires_grad_(False)
    return network, _fold_norms(network)


def has_own_prediction(network: nn.Module) -> bool:
    """Return whether a network has a layer that is replaced in predictions; see `folded`."""
    return any(hasattr(layer, "for_prediction") for layer in network.modules())


def _own_prediction(layer: nn.Module, stochastic: bool) -> nn.Module | None:
    """Return what a layer offers for predictions; None if it offers nothing, is watched by hooks or must sample."""
    offer = getattr(layer, "for_prediction", None)
    if offer is None or (stochastic and stochastic_layers(layer)):
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return None
    with torch.no_grad():
        replacement: nn.Module | None = offer()
    return None if replacement is None else replacement.eval().requires_grad_(False)


def _fold_norms(network: nn.Module) -> int:
    """Fold batch norms of a network in evaluation mode, in place; returns how many."""
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
    return count


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

    def __init__(self, network: nn.Module, channels_last: bool, stochastic: bool = False) -> None:
        self.network, _ = folded(network, stochastic)
        self.channels_last = channels_last
        if channels_last:
            self.network = with_fused_layers(self.network.to(memory_format=torch.channels_last))

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
