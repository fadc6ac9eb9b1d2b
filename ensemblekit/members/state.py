"""One member in training: its network, whether it still learns, and its optimizer's state between engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ensemblekit.core.plugin import Model

OptimizerState = dict[str, dict[str, Any]]
"""The state that an optimizer keeps of each parameter, by the parameter's name."""


@dataclass
class MemberState:
    """Everything that training changes about one member; engines work on these and keep them up to date."""

    network: nn.Module
    model: Model
    seed_index: int
    """The index that the network's seed was derived from; copies share that of their original."""
    frozen: bool = False
    steps: int = 0
    """Steps that it has been trained for."""
    uses_global_rng: bool = False
    """Whether its network samples from torch's global random generator in training, which threads would share."""
    optimizer_state: OptimizerState = field(default_factory=dict)

    @property
    def can_learn(self) -> bool:
        """Whether its network has a parameter that training may change."""
        return any(parameter.requires_grad for parameter in self.network.parameters())

    @property
    def num_parameters(self) -> int:
        """The number of parameters of its network."""
        return sum(parameter.numel() for parameter in self.network.parameters())
