"""A residual network with binary weights and activations."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from ensemblekit import Noise, Problem
from ensemblekit_models.binary_prediction import IntegerBlock, has_integer_convolutions
from ensemblekit_models.binary_training import SignConvolution, trains_with_integers
from ensemblekit_models.image_model import ImageModel, too_many_poolings
from ensemblekit_models.softmax import SOFTMAX


class BinaryResNet(ImageModel):
    """A small residual network whose weights and activations are -1 or +1.

    Real-valued latent weights are trained with the straight-through estimator. The input of the first convolution stays
    real, and so do the residual sums between blocks, which are normalised and binarised in front of each convolution.
    Therefore batch norm comes before each convolution instead of after it. Otherwise it is the model `resnet`, with the
    same number of parameters plus the scale of the output.
    """

    paper = "Hubara et al. 2016, Binarized Neural Networks"
    formula = "forward: sign(x), in training +1 with probability clip((x + 1) / 2, 0, 1); backward: 1 where |x| <= 1"

    width: int = Field(32, ge=1, description="filters of every convolution")
    blocks: int = Field(4, ge=1, description="number of residual blocks; each halves height and width")
    stochastic: bool = Field(
        True, description="sample the activations in training; weights, and activations in evaluation, are signs"
    )
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    def input_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        return super().input_problem(input_shape) or too_many_poolings(self.blocks, input_shape)

    def network(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, height, width = input_shape
        pixels = (height >> self.blocks) * (width >> self.blocks)
        return nn.Sequential(
            _RealInputConv2d(channels, self.width, kernel_size=3, padding=1),
            *(_Block(self.width, self.stochastic) for _ in range(self.blocks)),
            nn.BatchNorm2d(self.width),
            _BinaryActivation(self.stochastic),
            nn.Flatten(),
            _ScaledBinaryLinear(self.width * pixels, num_outputs),
        )


def binarise(values: Tensor, thresholds: Tensor | float = 0.0) -> Tensor:
    """Return -1 below the threshold and +1 from it on; the gradient is 1 where |value| ≤ 1 and 0 elsewhere."""
    if torch.is_grad_enabled():
        return _StraightThrough.apply(values, thresholds)
    return _signs(values, thresholds)


def _signs(values: Tensor, thresholds: Tensor | float) -> Tensor:
    # Clamping keeps nan, which a comparison would hide. Adding zero makes -0 positive.
    return torch.copysign(values.clamp(1, 1), (values - thresholds).add_(0.0))


class _StraightThrough(torch.autograd.Function):
    """Signs whose gradient is passed on where |value| ≤ 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, thresholds: Tensor | float) -> Tensor:
        return _signs(values, thresholds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0].detach().abs() <= 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None  # a product keeps the memory format; masked_fill loses channels_last


class _BinaryActivation(Noise):
    def __init__(self, stochastic: bool) -> None:
        super().__init__()
        self.stochastic = stochastic

    def thresholds(self, values: Tensor) -> Tensor | float:
        """Return what each value has to reach to become +1."""
        if not (self.draws and self.stochastic):
            return 0.0
        # A value reaches a threshold that is uniform on (-1, 1] with the probability of the hard sigmoid.
        return self.symmetric(values.shape, values.ndim == 4 and values.stride(1) == 1).to(values.dtype)

    def forward(self, values: Tensor) -> Tensor:
        return binarise(values, self.thresholds(values))


class _RealInputConv2d(nn.Conv2d):
    """Weights of ±1 on real inputs, scaled so that inputs of unit variance give outputs of unit variance."""

    def forward(self, images: Tensor) -> Tensor:
        gain = self.weight[0].numel() ** -0.5
        return functional.conv2d(images, binarise(self.weight), self.bias, padding=self.padding) * gain

    def for_prediction(self) -> nn.Module:
        """Return a convolution with the signs, which are then not computed anew in each call."""
        layer = nn.Conv2d(self.in_channels, self.out_channels, kernel_size=3, padding=1, device="meta")
        gain = self.weight[0].numel() ** -0.5
        layer.weight = nn.Parameter(binarise(self.weight) * gain)
        layer.bias = None if self.bias is None else nn.Parameter(self.bias * gain)
        return layer


class _BinaryConv2d(nn.Conv2d):
    """Weights of ±1 on activations of ±1; the padding is -1, since 0 is not a binary value."""

    def forward(self, activations: Tensor) -> Tensor:
        padded = functional.pad(activations, (1, 1, 1, 1), value=-1.0)
        return functional.conv2d(padded, binarise(self.weight))


class _ScaledBinaryLinear(nn.Linear):
    """Weights of ±1 on activations of ±1; the resulting integers are multiplied by a trained scale."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.scale = nn.Parameter(torch.tensor(in_features**-0.5))

    def forward(self, activations: Tensor) -> Tensor:
        return functional.linear(activations, binarise(self.weight)) * self.scale + self.bias


class _Block(nn.Module):
    """(B, W, H, W') → (B, W, H // 2, W' // 2); the sum stays real, so that gradients reach every block.

    Max-pooling increases the sum, so its sign would carry little information without the batch norm that follows.
    """

    def __init__(self, width: int, stochastic: bool) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.BatchNorm2d(width),
            _BinaryActivation(stochastic),
            _BinaryConv2d(width, width, kernel_size=3, bias=False),
            nn.BatchNorm2d(width),
            _BinaryActivation(stochastic),
            _BinaryConv2d(width, width, kernel_size=3, bias=False),
        )
        self.gain = (9 * width) ** -0.5  # scales a sum of 9 W signs to unit variance
        self.pool = nn.MaxPool2d(2)

    def for_prediction(self) -> nn.Module | None:
        """Return the block with packed weights and 8-bit integers; None where torch cannot compute these."""
        tensors = [*self.parameters(), *self.residual.buffers()]
        is_float32 = all(tensor.dtype == torch.float32 for tensor in self.parameters())
        if not is_float32 or any(tensor.device.type != "cpu" for tensor in tensors) or not has_integer_convolutions():
            return None
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            return None  # signs would hide nan
        norms = [layer for layer in self.residual if isinstance(layer, nn.BatchNorm2d)]
        signs = [binarise(layer.weight) for layer in self.residual if isinstance(layer, _BinaryConv2d)]
        return IntegerBlock(norms, signs, self.gain, self.pool)

    def forward(self, sums: Tensor) -> Tensor:
        watched = any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.residual)
        fast = self.training and not watched and trains_with_integers(sums)
        residual = self._residual_of_integers(sums) if fast else self.residual(sums)
        return self.pool(torch.add(sums, residual, alpha=self.gain))

    def _residual_of_integers(self, values: Tensor) -> Tensor:
        layers: list[Any] = list(self.residual)
        for norm, activation, convolution in (layers[:3], layers[3:]):
            normed = norm(values)
            values = SignConvolution.apply(normed, activation.thresholds(normed), binarise(convolution.weight))
        return values
