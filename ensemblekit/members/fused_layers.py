"""Batch norm and ReLU of images as one operation on a CPU, and the end of a residual block as another one.

Between convolutions, most of the time goes into reading and writing images. Compiled code reads them once for the
statistics and once for the results, and computes again in the backward pass what it would else have to store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ensemblekit.core import kernels


def norm_relu(images: Tensor, norm: nn.Module, skip: Tensor | None = None) -> Tensor:
    """Compute relu(norm(images)); with `skip`, the end of a residual block: max-pool(skip + relu(norm(images))).

    On a CPU this is one operation for float32 images in channels_last layout: in training with an `nn.BatchNorm2d`, and
    in predictions with an `nn.Identity`, which takes the place of a folded batch norm. Else it is torch's operations.

    Args:
        images: (B, C, H, W).
        norm: the batch norm.
        skip: the input of the block, (B, C, H, W).

    Returns:
        (B, C, H, W), or with `skip` (B, C, H // 2, W // 2).
    """
    if _can_fuse(images, norm, skip):
        if not isinstance(norm, nn.BatchNorm2d):
            return _NormReLU.forward(None, images, skip, None, None, None)
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        outputs: Tensor = _NormReLU.apply(images, skip, norm.weight, norm.bias, norm)
        return outputs
    results = functional.relu(norm(images))
    return results if skip is None else functional.max_pool2d(skip + results, 2)


def _can_fuse(images: Tensor, norm: Any, skip: Tensor | None) -> bool:
    """Whether compiled code can compute it, from tensors as it reads them."""
    if type(norm) is nn.BatchNorm2d:
        has_statistics = norm.training and norm.track_running_stats and norm.momentum is not None
        if not (has_statistics and norm.affine and norm.num_features == images.shape[1]):
            return False
        parameters = [norm.weight, norm.bias]
    else:
        needs_gradient = torch.is_grad_enabled() and (images.requires_grad or (skip is not None and skip.requires_grad))
        if type(norm) is not nn.Identity or skip is None or needs_gradient:
            return False
        parameters = []
    tensors = [images] if skip is None else [images, skip]
    return (
        images.ndim == 4
        and images.numel() > images.shape[1]  # the variance of one value is not defined
        and images.shape[1] <= kernels.MAX_CHANNELS
        and all(each.is_contiguous(memory_format=torch.channels_last) for each in tensors)
        and (skip is None or (skip.shape == images.shape and min(images.shape[2:]) > 1))
        and kernels.accept(*(each.permute(0, 2, 3, 1) for each in tensors), *parameters)
    )


class _NormReLU(torch.autograd.Function):
    """See `norm_relu`."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, skip: Tensor | None, scale: Tensor | None, shift: Tensor | None, norm: Any
    ) -> Tensor:
        batch, channels, height, width = images.shape
        size = (height, width) if skip is None else (height // 2, width // 2)
        outputs = torch.empty(batch, channels, *size, memory_format=torch.channels_last)
        statistics = None if norm is None else images.new_empty(2, channels)
        plan = _plan(images, skip, scale, shift, statistics)
        plan.outputs = outputs.data_ptr()
        if norm is not None:
            ctx.save_for_backward(images, skip, scale, shift, statistics)
            sums = torch.empty(kernels.SLICES, 2, channels, dtype=torch.float64)
            plan.sums, plan.eps, plan.momentum = sums.data_ptr(), norm.eps, norm.momentum
            plan.running_mean, plan.running_variance = norm.running_mean.data_ptr(), norm.running_var.data_ptr()
        kernels.image_norm_forward(plan, torch.get_num_threads())
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, skip, scale, shift, statistics = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        input_gradient, parameter_gradients = torch.empty_like(images), torch.empty_like(statistics)
        skip_gradient = None if skip is None else torch.empty_like(skip)
        plan = _plan(images, skip, scale, shift, statistics)
        plan.gradient, plan.input_gradient = gradient.data_ptr(), input_gradient.data_ptr()
        plan.skip_gradient = None if skip_gradient is None else skip_gradient.data_ptr()
        plan.scale_gradient, plan.shift_gradient = (row.data_ptr() for row in parameter_gradients)
        sums = torch.empty(kernels.SLICES, 2, images.shape[1], dtype=torch.float64)
        plan.sums = sums.data_ptr()
        kernels.image_norm_backward(plan, torch.get_num_threads())
        return input_gradient, skip_gradient, *parameter_gradients, None


def _plan(
    images: Tensor, skip: Tensor | None, scale: Tensor | None, shift: Tensor | None, statistics: Tensor | None
) -> kernels.ImageNorm:
    """Return what both passes read; without a batch norm, there are only images."""
    batch, channels, height, width = images.shape
    plan = kernels.ImageNorm(batch, height, width, channels, images.data_ptr())
    plan.skip = None if skip is None else skip.data_ptr()
    if scale is not None and shift is not None and statistics is not None:
        plan.scale, plan.shift = scale.data_ptr(), shift.data_ptr()
        plan.mean, plan.inverse = (row.data_ptr() for row in statistics)
    return plan


class NormReLU(nn.Module):
    """A batch norm of images and the ReLU after it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        return norm_relu(images, self.norm)


def with_fused_layers(network: nn.Module) -> nn.Module:
    """Return a network that computes the same with fused layers, where that is certainly valid.

    It shares all parameters, buffers and other layers with the network. In each `nn.Sequential`, a batch norm of images
    and the ReLU that follows it directly are one layer. Layers with a method `with_fused_operations() -> nn.Module` are
    replaced by what it returns.

    Args:
        network: the network of a member, or a folded copy.
    """
    if kernels.library() is None or _has_hooks(network):
        return network
    offer: Callable[[], nn.Module] | None = getattr(network, "with_fused_operations", None)
    if offer is not None:
        own = offer()
        for name, child in list(own.named_children()):
            setattr(own, name, with_fused_layers(child))
        return own
    if type(network) is not nn.Sequential:
        return network
    layers = list(network)
    fused: list[nn.Module] = []
    while layers:
        layer, *layers = layers
        if layers and _is_pair(layer, layers[0]):
            fused.append(NormReLU(layer))
            layers = layers[1:]
        else:
            fused.append(with_fused_layers(layer))
    return nn.Sequential(*fused)


def _is_pair(layer: nn.Module, following: nn.Module) -> bool:
    types = type(layer) is nn.BatchNorm2d and type(following) is nn.ReLU
    return types and not _has_hooks(layer) and not _has_hooks(following)


def _has_hooks(layer: nn.Module) -> bool:
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))
