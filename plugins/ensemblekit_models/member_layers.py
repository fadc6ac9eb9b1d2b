"""Layers that compute all members of a family at once, without a loop over the members.

Features of K members are (B, K, F); their images lie side by side in the channels, (B, K * C, H, W). Samples come
first, as dropout expects.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def random_signs(*shape: int) -> Tensor:
    """Sample -1 or +1 with equal probability."""
    return torch.empty(shape).bernoulli_(0.5).mul_(2).sub_(1)


class MemberScale(nn.Module):
    """Multiplies features by factors of each member, initially -1 or +1: (B, F) or (B, K, F) → (B, K, F)."""

    def __init__(self, num_members: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(random_signs(num_members, size))

    def forward(self, features: Tensor) -> Tensor:
        return _with_members(features) * self.scale


class RankOneLinear(nn.Module):
    """A linear layer s ∘ W(r ∘ x) + b: all members share W, each has its own r, s and b.

    Maps (B, inputs), from which all members start, or (B, K, inputs) to (B, K, outputs).
    """

    def __init__(self, num_members: int, inputs: int, outputs: int, signs: tuple[bool, bool]) -> None:
        """Initialise W and b like `nn.Linear`, with the same b for all members.

        Args:
            num_members: Number of members K.
            inputs: Features of each member.
            outputs: Features that each member computes.
            signs: Whether r and s start as random signs; if not, as ones.
        """
        super().__init__()
        shared = nn.Linear(inputs, outputs)
        self.weight = shared.weight
        self.r, self.s = (
            nn.Parameter(random_signs(num_members, size) if random else torch.ones(num_members, size))
            for random, size in zip(signs, (inputs, outputs), strict=True)
        )
        self.bias = nn.Parameter(shared.bias.detach().repeat(num_members, 1))

    def forward(self, features: Tensor) -> Tensor:
        shared = functional.linear(_with_members(features) * self.r, self.weight)
        return torch.addcmul(self.bias, shared, self.s)


class RankOneConv2d(nn.Module):
    """A padded 3 × 3 convolution with shared weights, multiplied by each member's s for the output and r for the input.

    Maps (B, inputs, H, W), from which all members start, or (B, K * inputs, H, W) to (B, K * outputs, H, W).
    """

    def __init__(
        self, num_members: int, inputs: int, outputs: int, shared_inputs: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        shared = nn.Conv2d(inputs, outputs, kernel_size=3, bias=bias)
        self.weight = shared.weight
        self.r = nn.Parameter(random_signs(num_members, inputs))
        self.s = nn.Parameter(random_signs(num_members, outputs))
        self.bias = None if shared.bias is None else nn.Parameter(shared.bias.detach().repeat(num_members, 1))
        self.groups = 1 if shared_inputs else num_members

    def forward(self, images: Tensor) -> Tensor:
        # Scaling the weights takes less time than scaling the images, which are larger, and keeps their memory format.
        factors = self.s[:, :, None] * self.r[:, None, :]
        weights = (self.weight * factors[..., None, None]).flatten(0, 1)
        bias = None if self.bias is None else self.bias.flatten()
        return functional.conv2d(images, weights, bias, padding=1, groups=self.groups)


class MemberLinear(nn.Module):
    """A linear layer of each member's own: (B, inputs) or (B, K, inputs) → (K, B, outputs)."""

    def __init__(self, num_members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as in nn.Linear
        self.weight = nn.Parameter(torch.empty(num_members, outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_members, outputs).uniform_(-bound, bound))

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim == 2:  # one large product instead of K small ones with equal features
            outputs = functional.linear(features, self.weight.flatten(0, 1), self.bias.flatten())
            return outputs.unflatten(1, self.bias.shape).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], features.transpose(0, 1), self.weight.mT)


class MembersFirst(nn.Module):
    """The last layer of a family: (B, K, C) → (K, B, C)."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.transpose(0, 1)


def _with_members(features: Tensor) -> Tensor:
    return features.unsqueeze(1) if features.ndim == 2 else features
