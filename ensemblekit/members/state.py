"""One network in training, whether it still learns, and its optimizer's state between engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ensemblekit.core.plugin import Model
from ensemblekit.spec.optimizers import AnyOptimizer

OptimizerState = dict[str, dict[str, Any]]
"""The state that an optimizer keeps of each parameter, by the parameter's name."""


@dataclass
class MemberState:
    """Everything that training changes about one network: a member, a family of members or an auxiliary network.

    Engines work on these and keep them up to date.
    """

    network: nn.Module
    model: Model
    seed_index: int
    """The index that the network's seed was derived from, that of its first member; copies share their original's."""
    frozen: bool = False
    steps: int = 0
    """Steps that it has been trained for."""
    uses_global_rng: bool = False
    """Whether its network samples from torch's global random generator in training, which threads would share."""
    optimizer_state: OptimizerState = field(default_factory=dict)
    size: int = 1
    """The number of members that the network computes: more than one only for a family."""
    auxiliary: str = ""
    """The name of its group, if it is an auxiliary network and not a member."""
    optimizer: AnyOptimizer | None = None
    """Its optimizer, if it is not that of the spec."""
    start: Tensor | None = None
    """Its learned parameters when training started, (P,), if a method needs them."""
    rank: int = 0
    """The process that trains it, if there are several."""
    is_here: bool = True
    """Whether that is this process; elsewhere the network has shapes, but no values."""
    known: dict[str, Tensor] = field(default_factory=dict)
    """Its outputs (K, N, C) for all samples of a split, by the name of the split, as long as they cannot change."""

    @property
    def indices(self) -> list[int]:
        """The indices in the spec of the members that it computes."""
        return list(range(self.seed_index, self.seed_index + self.size))

    @property
    def can_learn(self) -> bool:
        """Whether its network has a parameter that training may change."""
        return any(parameter.requires_grad for parameter in self.network.parameters())

    @property
    def num_parameters(self) -> int:
        """The number of parameters of its network."""
        return sum(parameter.numel() for parameter in self.network.parameters())
