"""A reduced MobileNetV3-small: the base model for larger images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field
from torch import Tensor, nn

from ensemblekit_models.image_model import ImageModel
from ensemblekit_models.softmax import SOFTMAX

SMALL_IMAGE = 64
"""Images with sides up to this many pixels are not halved by the first two layers."""


@dataclass(frozen=True)
class _Bottleneck:
    kernel: int
    expanded: int
    out: int
    squeeze: bool
    activation: type[nn.Module]
    stride: int


# MobileNetV3-small without its last three bottlenecks. Where the GNCL paper lists 60 channels, this has 64: MobileNet
# keeps sizes divisible by 8.
BOTTLENECKS = (
    _Bottleneck(3, 16, 16, True, nn.ReLU, 2),
    _Bottleneck(3, 72, 24, False, nn.ReLU, 2),
    _Bottleneck(3, 88, 24, False, nn.ReLU, 1),
    _Bottleneck(5, 96, 40, True, nn.Hardswish, 2),
    _Bottleneck(5, 120, 40, True, nn.Hardswish, 1),
    _Bottleneck(5, 120, 40, True, nn.Hardswish, 1),
    _Bottleneck(5, 64, 48, True, nn.Hardswish, 1),
    _Bottleneck(5, 72, 48, True, nn.Hardswish, 1),
)
STEM_CHANNELS, LAST_CHANNELS, HEAD_CHANNELS = 16, 72, 512


class MobileNetV3Tiny(ImageModel):
    """MobileNetV3-small without its last three bottlenecks; images of up to 64 pixels are halved twice less often."""

    paper = "Howard et al. 2019, Searching for MobileNetV3; as in Buschjäger et al. 2020"
    formula = "conv, 8 inverted residuals with squeeze-and-excitation, conv, global average, conv, dropout, linear"

    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability before the linear layer")
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    def network(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, height, width = input_shape
        small = max(height, width) <= SMALL_IMAGE
        layers = _conv_norm(channels, STEM_CHANNELS, nn.Hardswish, kernel=3, stride=1 if small else 2)
        inputs = STEM_CHANNELS
        for index, bottleneck in enumerate(BOTTLENECKS):
            shape = replace(bottleneck, stride=1) if small and index == 0 else bottleneck
            layers.append(_InvertedResidual(inputs, shape))
            inputs = shape.out
        return nn.Sequential(
            *layers,
            *_conv_norm(inputs, LAST_CHANNELS, nn.Hardswish),
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(LAST_CHANNELS, HEAD_CHANNELS, kernel_size=1, bias=False),
            nn.Hardswish(inplace=True),
            nn.Flatten(),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            nn.Linear(HEAD_CHANNELS, num_outputs),
        )


def _conv_norm(
    inputs: int, outputs: int, activation: type[nn.Module] | None, kernel: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Build a padded convolution, batch norm and, unless it is None, an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return layers if activation is None else [*layers, activation(inplace=True)]


class _InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection: (B, inputs, …) → (B, out, …)."""

    def __init__(self, inputs: int, shape: _Bottleneck) -> None:
        super().__init__()
        expanded, activation = shape.expanded, shape.activation
        layers = [] if expanded == inputs else _conv_norm(inputs, expanded, activation)
        layers += _conv_norm(expanded, expanded, activation, shape.kernel, shape.stride, groups=expanded)
        if shape.squeeze:
            layers.append(_SqueezeExcitation(expanded))
        self.layers = nn.Sequential(*layers, *_conv_norm(expanded, shape.out, None))
        self.keeps_shape = shape.stride == 1 and inputs == shape.out

    def forward(self, images: Tensor) -> Tensor:
        filtered = self.layers(images)
        return images + filtered if self.keeps_shape else filtered


class _SqueezeExcitation(nn.Module):
    """Multiplies each channel by a function of all channels' means; the shape (B, C, H, W) stays the same."""

    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.Linear(channels, channels // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels, bias=False),
            nn.Hardsigmoid(),
        )

    def forward(self, images: Tensor) -> Tensor:
        return images * self.weights(images.mean(dim=(2, 3)))[:, :, None, None]
