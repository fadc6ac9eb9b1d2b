"""The small residual network of the GNCL paper."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from ensemblekit import Problem, norm_relu
from ensemblekit_models.image_model import ImageModel, too_many_poolings
from ensemblekit_models.softmax import SOFTMAX


class ResNet(ImageModel):
    """A small residual network: a convolution, residual blocks that each halve the image, a linear layer."""

    paper = "He et al. 2016, Deep Residual Learning for Image Recognition; as in Buschjäger et al. 2020, sec. 5"
    formula = "conv-BN-ReLU, blocks x [max-pool(x + conv-BN-ReLU-conv-BN-ReLU(x))], dropout, linear"

    width: int = Field(32, ge=1, description="filters of every convolution")
    blocks: int = Field(4, ge=1, description="number of residual blocks; each halves height and width")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability before the linear layer")
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    def input_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        return super().input_problem(input_shape) or too_many_poolings(self.blocks, input_shape)

    def network(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, height, width = input_shape
        pixels = (height >> self.blocks) * (width >> self.blocks)
        return nn.Sequential(
            nn.Conv2d(channels, self.width, kernel_size=3, padding=1),
            nn.BatchNorm2d(self.width),
            nn.ReLU(inplace=True),
            *(_block(self.width) for _ in range(self.blocks)),
            nn.Flatten(),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            nn.Linear(self.width * pixels, num_outputs),
        )


class ResidualBlock(nn.Module):
    """Two convolutions, added to their input and pooled: (B, C, H, W) → (B, C, H // 2, W // 2)."""

    def __init__(self, first: nn.Module, second: nn.Module, channels: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            first,
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            second,
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(images + self.residual(images))

    def with_fused_operations(self) -> nn.Module:
        """Return a block that computes the same with fewer operations."""
        return _FusedBlock(self.residual[:4], self.residual[4])


class _FusedBlock(nn.Module):
    """The layers of a residual block, with all that follows the second convolution as one operation."""

    def __init__(self, layers: nn.Module, last_norm: nn.Module) -> None:
        super().__init__()
        self.layers, self.last_norm = layers, last_norm

    def forward(self, images: Tensor) -> Tensor:
        return norm_relu(self.layers(images), self.last_norm, skip=images)


def _block(width: int) -> nn.Module:
    first, second = (nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False) for _ in range(2))
    return ResidualBlock(first, second, width)
