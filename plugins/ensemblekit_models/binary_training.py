"""Training of binary convolutions with 8-bit integers: the same outputs as with floating-point numbers, sooner.

Sums of signs are integers, which both compute exactly. Activations are stored as 0 and 1, as in predictions: a quarter
of the memory, and the padding of -1 is a padding of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ensemblekit_models.binary_prediction import SignConv2d, has_integer_convolutions

_ABOVE_ONE = 1 + 2**-23
"""The next float32 above 1: gradients of the clipped identity stop at its ends, here they pass where |value| ≤ 1."""


def trains_with_integers(values: Tensor) -> bool:
    """Return whether `SignConvolution` computes these values (B, C, H, W).

    Only in channels_last, the memory format of these operators; in others it would be copied twice.
    """
    return (
        type(values) is Tensor
        and values.device.type == "cpu"
        and values.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(values)
        and not torch.is_autocast_enabled("cpu")
        and values.is_contiguous(memory_format=torch.channels_last)
        and not values.is_contiguous()
        and has_integer_convolutions()
    )


class SignConvolution(torch.autograd.Function):
    """The 3 × 3 convolution, padded with -1, of activations +1 where a value reaches its threshold, and -1 elsewhere.

    The gradient of the values is that of the activations where |value| ≤ 1, and 0 elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, thresholds: Tensor | float, signs: Tensor) -> Tensor:
        """Return the sums (B, O, H, W).

        Args:
            ctx: keeps what the gradients need.
            values: (B, C, H, W) of a batch norm in training, whose channels are nan as a whole or not at all.
            thresholds: of the same shape, or one number.
            signs: the weights of ±1 (O, C, 3, 3).
        """
        activations = torch.ge(values, thresholds).view(torch.uint8)
        ctx.save_for_backward(values, activations, signs)
        hidden = 0 * values[:1, :, :1, :1].sum()  # nan if a value is nan, which a comparison hides
        return SignConv2d(signs, 2.0, hidden - signs.flatten(1).sum(dim=1)).sums(activations)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of the values and of the signs."""
        values, activations, signs = ctx.saved_tensors
        geometry: tuple[Any, ...] = ([len(signs)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
        back = torch.ops.aten.convolution_backward
        of_activations, of_signs, totals = back(gradient, activations.float(), signs, *geometry)
        of_values = torch.ops.aten.hardtanh_backward(of_activations, values, -_ABOVE_ONE, _ABOVE_ONE)
        return of_values, None, 2 * of_signs - totals.view(-1, 1, 1, 1)  # an activation is 2 b - 1
