"""The inputs of an exported graph, and the network in front of the members that prepares them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GraphInput:
    """One input of an exported graph."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    description: str
    """What the values are, in a sentence."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What a program needs to make the values, as JSON has it: the names of columns, the codes of categories."""

    @property
    def type_name(self) -> str:
        """The name of the type: `uint8`."""
        return str(self.dtype).removeprefix("torch.")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it; None stands for the size of the batch."""
        about = {"name": self.name, "type": self.type_name, "shape": [None, *self.shape]}
        return {**about, "description": self.description, **self.details}


class InputNetwork(nn.Module):
    """Prepares inputs as their owner has them for the members, inside an exported graph."""

    inputs: tuple[GraphInput, ...]
    """What `forward` takes, in its order."""

    @abstractmethod
    def forward(self, *raw: Tensor) -> Tensor:
        """Turn raw inputs (B, …) into the members' inputs (B, *input_shape)."""

    @abstractmethod
    def raw(self, stored: Tensor) -> tuple[Tensor, ...]:
        """Return raw inputs for samples (B, …) as `Dataset.load` returns them, on which a graph is compared."""
