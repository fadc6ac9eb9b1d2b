"""A softmax after the last layer, so that the outputs are probabilities."""

from __future__ import annotations

from pydantic import Field
from torch import nn

SOFTMAX = Field(False, description='end with a softmax: outputs are probabilities, as the loss "nll" takes them')
"""The parameter `softmax` of the built-in models."""


def with_softmax(network: nn.Module) -> nn.Module:
    """Append a softmax over the outputs (B, C) to a network."""
    softmax = nn.Softmax(dim=-1)
    return network.append(softmax) if isinstance(network, nn.Sequential) else nn.Sequential(network, softmax)
