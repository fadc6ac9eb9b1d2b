"""Predictions of binary residual blocks with 8-bit integers, in which signs and their sums are exact.

Activations are stored as 0 and 1 instead of -1 and +1: a = 2 b - 1. Then the padding of -1 is a padding of 0, and a
convolution of signs w is conv(a, w) = 2 conv(b, w) - sum(w), which oneDNN computes with 8-bit integers. Batch norm and
sign between two convolutions are a threshold on an integer, which is part of the first convolution.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_GEOMETRY: tuple[list[int], list[int], list[int], int] = ([1, 1], [1, 1], [1, 1], 1)
"""Stride, padding and dilation of the convolutions, and their number of groups."""


class SignConv2d(nn.Module):
    """A 3 × 3 convolution of activations 0 and 1 with weights of ±1; outputs are conv · scale + offset.

    Args:
        signs: weights of ±1 (O, C, 3, 3).
        scale: multiplies the integers.
        offset: added for each output channel (O,).
    """

    def __init__(self, signs: Tensor, scale: float, offset: Tensor) -> None:
        super().__init__()
        self.scale, self.offset = torch.full((len(signs),), scale), offset.float()
        self.zero = torch.zeros(len(signs), dtype=torch.int32)
        self.packed = torch.ops.onednn.qconv_prepack(signs.to(torch.int8), self.scale, 1.0, 0, *_GEOMETRY, None)

    def forward(self, activations: Tensor) -> Tensor:
        """Return 1 where the output is at least 1 and 0 where it is at most 0, uint8; outputs must be integers."""
        weights = (self.packed, self.scale, self.zero)
        operator = torch.ops.onednn.qconv2d_pointwise.default
        outputs: Tensor = operator(
            activations, 1.0, 0, *weights, self.offset, *_GEOMETRY, 1.0, 0, torch.uint8, "hardtanh", [0.0, 1.0], ""
        )
        return outputs

    def sums(self, activations: Tensor) -> Tensor:
        """Return the outputs (B, O, H, W), float32 in channels_last."""
        weights = (self.packed, self.scale, self.zero)
        operator = torch.ops.onednn.qconv2d_pointwise.default
        options: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
        outputs: Tensor = operator(activations, 1.0, 0, *weights, self.offset, *_GEOMETRY, *options)
        return outputs

    def add_to(self, sums: Tensor, activations: Tensor) -> Tensor:
        """Add the outputs to float32 sums (B, O, H, W), in place."""
        weights = (self.packed, self.scale, self.zero)
        operator = torch.ops.onednn.qconv2d_pointwise.binary
        options: tuple[Any, ...] = (1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], "")
        outputs: Tensor = operator(activations, 1.0, 0, *weights, sums, self.offset, *_GEOMETRY, *options)
        return outputs


class IntegerBlock(nn.Module):
    """pool(x + gain · conv(sign(norm(conv(sign(norm(x))))))), which may overwrite x, float32 in channels_last.

    Args:
        norms: the two batch norms, in evaluation mode.
        signs: the weights of ±1 (W, W, 3, 3) of the two convolutions.
        gain: multiplies what the second one gives.
        pool: the pooling.
    """

    def __init__(self, norms: list[nn.BatchNorm2d], signs: list[Tensor], gain: float, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool
        self.direction, self.threshold = _threshold(norms[0])
        first, second = signs
        direction, threshold = _integer_threshold(norms[1], first[0].numel())
        first = first * direction.view(-1, 1, 1, 1)
        # 1 where conv(a, w) - threshold + 1 is at least 1
        self.first = SignConv2d(first, 2.0, 1 - threshold - first.flatten(1).sum(dim=1))
        self.second = SignConv2d(second, 2 * gain, -gain * second.flatten(1).sum(dim=1))

    def forward(self, sums: Tensor) -> Tensor:
        sums = sums.contiguous(memory_format=torch.channels_last)
        directed = sums if self.direction is None else sums * self.direction
        # as large as an image: a comparison with one number for each channel is slower
        threshold = self.threshold.expand(1, *sums.shape[1:]).contiguous(memory_format=torch.channels_last)
        activations = torch.ge(directed, threshold).view(torch.uint8)
        outputs: Tensor = self.pool(self.second.add_to(sums, self.first(activations)))
        return outputs


def _threshold(norm: nn.BatchNorm2d) -> tuple[Tensor | None, Tensor]:
    """Return directions ±1 and thresholds (1, W, 1, 1): norm(x) ≥ 0 where x · direction ≥ threshold.

    Directions are None if all are +1.
    """
    slope, intercept = _affine(norm)
    direction = torch.where(slope < 0, -1.0, 1.0)
    exact = -intercept.double() / slope.abs().double()
    always = torch.where(intercept >= 0, -torch.inf, torch.inf).double()  # of a slope of zero
    exact = torch.where(slope == 0, always, exact)
    rounded = exact.float()
    # the smallest float32 that is not below the exact threshold
    rounded = torch.where(rounded.double() < exact, rounded.nextafter(torch.tensor(torch.inf)), rounded)
    shape = (1, -1, 1, 1)
    return None if bool((direction > 0).all()) else direction.view(shape), rounded.view(shape)


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return slope and intercept (W,) of a batch norm in evaluation mode."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    slope = norm.weight / (norm.running_var + norm.eps).sqrt()
    return slope, norm.bias - norm.running_mean * slope


def _integer_threshold(norm: nn.BatchNorm2d, largest: int) -> tuple[Tensor, Tensor]:
    """Return directions ±1 and integer thresholds (W,): norm(n) ≥ 0 where n · direction ≥ threshold, |n| ≤ largest."""
    numbers = torch.arange(-largest, largest + 1, dtype=torch.float32)
    table = norm(numbers.view(-1, 1, 1, 1).repeat(1, norm.num_features, 1, 1)).flatten(1) >= 0
    direction = torch.where(table[0] & ~table[-1], -1.0, 1.0)
    return direction, largest + 1 - table.sum(dim=0).float()


@cache
def has_integer_convolutions() -> bool:
    """Return whether torch computes these convolutions with 8-bit integers here, and rightly."""
    signs = torch.ones(2, 2, 3, 3)
    signs[1, :, 0] = -1
    activations = (torch.arange(50).view(1, 2, 5, 5) % 3 == 0).contiguous(memory_format=torch.channels_last)
    expected = nn.functional.conv2d(activations.float(), signs, padding=1)
    try:
        sums = torch.ones(1, 2, 5, 5).contiguous(memory_format=torch.channels_last)
        added = SignConv2d(signs, 1.0, torch.ones(2)).add_to(sums, activations.view(torch.uint8))
        above = SignConv2d(signs, 1.0, torch.full((2,), -2.0))(activations.view(torch.uint8))
        plain = SignConv2d(signs, 2.0, torch.ones(2)).sums(activations.view(torch.uint8))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False  # another version of torch, or a build without oneDNN
    is_right = torch.equal(added, expected + 2) and torch.equal(above, (expected >= 3).to(torch.uint8))
    return is_right and torch.equal(plain, 2 * expected + 1)
