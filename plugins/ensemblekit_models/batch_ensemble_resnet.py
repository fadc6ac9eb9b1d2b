"""BatchEnsemble of the residual network of the GNCL paper."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from ensemblekit import Problem
from ensemblekit_models.image_model import ImageFamily, too_many_poolings
from ensemblekit_models.member_layers import MembersFirst, RankOneConv2d, RankOneLinear
from ensemblekit_models.resnet import ResidualBlock
from ensemblekit_models.softmax import SOFTMAX


class BatchEnsembleResNet(ImageFamily):
    """The model `resnet` with weights shared by all members, each of which multiplies them by a matrix of rank one.

    The factors start as random signs. Each member has its own batch norms and biases, so that its outputs do not depend
    on the other members, in training neither.
    """

    paper = "Wen et al. 2020, BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong Learning"
    formula = "member k has the layers of resnet with weights W ∘ (s_k r_k^T), and its own batch norms and biases"

    width: int = Field(32, ge=1, description="filters of every convolution of a member")
    blocks: int = Field(4, ge=1, description="number of residual blocks; each halves height and width")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability before the linear layer")
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    def input_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        return super().input_problem(input_shape) or too_many_poolings(self.blocks, input_shape)

    def family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        channels, height, width = input_shape
        features = self.width * (height >> self.blocks) * (width >> self.blocks)
        return nn.Sequential(
            RankOneConv2d(num_members, channels, self.width, shared_inputs=True, bias=True),
            nn.BatchNorm2d(num_members * self.width),
            nn.ReLU(inplace=True),
            *(self._block(num_members) for _ in range(self.blocks)),
            nn.Flatten(),
            nn.Unflatten(1, (num_members, features)),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            RankOneLinear(num_members, features, num_outputs, signs=(True, True)),
            MembersFirst(),
        )

    def _block(self, num_members: int) -> nn.Module:
        first, second = (RankOneConv2d(num_members, self.width, self.width) for _ in range(2))
        return ResidualBlock(first, second, num_members * self.width)
