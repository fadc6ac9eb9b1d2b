"""Packed ensemble of the residual network of the GNCL paper."""

from __future__ import annotations

from math import ceil

from pydantic import Field
from torch import nn

from ensemblekit import Problem
from ensemblekit_models.image_model import ImageFamily, too_many_poolings
from ensemblekit_models.member_layers import MemberLinear
from ensemblekit_models.resnet import ResidualBlock
from ensemblekit_models.softmax import SOFTMAX


class PackedResNet(ImageFamily):
    """The model `resnet`, split into narrower members by grouped convolutions that compute all of them at once.

    Members share no weights. With alpha = M and gamma = 1 they are M networks of the model `resnet`.
    """

    paper = "Laurent et al. 2023, Packed-Ensembles for Efficient Uncertainty Estimation"
    formula = "member k has the layers of resnet with alpha width / M filters; second convolutions have gamma groups"

    width: int = Field(32, ge=1, description="filters of every convolution of the network that is split")
    blocks: int = Field(4, ge=1, description="number of residual blocks; each halves height and width")
    alpha: float = Field(
        2.0, gt=0, description="factor of the width: each of M members has alpha * width / M filters, rounded up"
    )
    gamma: int = Field(
        1, ge=1, description="groups of the second convolution of a member's block; its filters are a multiple of it"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability before the linear layer")
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    def input_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        return super().input_problem(input_shape) or too_many_poolings(self.blocks, input_shape)

    def member_width(self, num_members: int) -> int:
        """Return the filters of one member: alpha * width / M, rounded up to a multiple of gamma."""
        groups = self.alpha * self.width / num_members / self.gamma
        return self.gamma * ceil(round(groups, 9))  # 1.1 * 10 is 11.000000000000002

    def family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        channels, height, width = input_shape
        own = self.member_width(num_members)
        filters = num_members * own
        features = own * (height >> self.blocks) * (width >> self.blocks)
        return nn.Sequential(
            nn.Conv2d(channels, filters, kernel_size=3, padding=1),
            nn.BatchNorm2d(filters),
            nn.ReLU(inplace=True),
            *(self._block(filters, num_members) for _ in range(self.blocks)),
            nn.Flatten(),
            nn.Unflatten(1, (num_members, features)),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            MemberLinear(num_members, features, num_outputs),
        )

    def _block(self, filters: int, num_members: int) -> nn.Module:
        # The first convolution mixes the groups of a member, as in the authors' package.
        first, second = (
            nn.Conv2d(filters, filters, kernel_size=3, padding=1, groups=groups, bias=False)
            for groups in (num_members, num_members * self.gamma)
        )
        return ResidualBlock(first, second, filters)
