"""Combines the outputs of a trained ensemble's members, also where only the outputs are there and no network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ensemblekit.core.errors import UsageError
from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import Metric, evaluate
from ensemblekit.core.objective import Objective
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.runs.outputs import KeptOutputs


@dataclass(frozen=True)
class Combiner:
    """How the members' outputs become the ensemble's: methods, loss, fitted parameters and scaling of the targets."""

    objective: Objective
    """The methods, which combine, and the loss, which defines what outputs mean."""
    num_members: int
    """The number of members; there are several outputs of each if it has several stochastic passes."""
    fitted: Tensor | None = None
    """Parameters of the combination, if a method fits them."""
    target_scaling: TargetScaling | None = None
    """How real targets were standardised; outputs are in the original units."""
    dtype: torch.dtype = torch.float32
    """The floating-point type of the networks."""
    indices: tuple[int, ...] | None = None
    """The indices of the members in the spec; None: 0, 1, 2 …"""
    extra_metrics: tuple[Metric, ...] = ()
    """Metrics beside the built-in ones."""

    @property
    def loss(self) -> Loss:
        """The loss that the members were trained with."""
        return self.objective.loss

    def of_size(self, num_members: int) -> Self:
        """Return the combiner for the outputs of so many of the members; not if its parameters were fitted for all."""
        return replace(self, num_members=num_members, indices=None)

    @property
    def needs_all_members(self) -> bool:
        """Whether it is only defined for the outputs of all members: of some, it would be another combination."""
        return self.fitted is not None or self.objective.combines_more

    def combine(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs (M, N, C), in the original units in regression, to the ensemble's (N, C)."""
        return self.restored(self.combine_learned(self.learned(outputs)))

    def combine_learned(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs as they learnt them: standardised if the targets were.

        Raises:
            UsageError: the combination needs more than the members' outputs, such as those of a gate.
        """
        if self.objective.combines_more:
            what = "the combination needs more than the members' outputs"
            raise UsageError(what, "combine", "give the inputs to the ensemble itself: ensemble(inputs)")
        return self.combine_networks(outputs, len(outputs) // self.num_members)

    def combine_networks(self, outputs: Tensor, passes: int) -> Tensor:
        """Combine the outputs of all networks that predict (S · R, N, W), as they learnt them, of S passes."""
        fitted = None if self.fitted is None else self.fitted.to(outputs)
        indices = None if self.indices is None else torch.tensor(self.indices, device=outputs.device)
        return self.objective.predict(outputs, fitted, passes, indices)

    def combine_kept(self, kept: KeptOutputs) -> Tensor:
        """Combine kept outputs, in the original units in regression, to the ensemble's outputs as it learnt them."""
        if kept.networks is None:
            return self.combine_learned(self.learned(kept.outputs))
        return self.combine_networks(kept.networks, len(kept.outputs) // self.num_members)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Compute the ensemble's class probabilities (N, K) from the members' outputs (M, N, C)."""
        return self.loss.probabilities(self.combine(outputs))

    def metrics(self, kept: KeptOutputs) -> dict[str, float]:
        """Compute all metrics from kept outputs: those of the run's result, by names without the prefix of a split."""
        outputs, targets = self.learned(kept.outputs), self.learned_targets(kept.targets)
        restore = None if self.target_scaling is None else self.target_scaling.restore
        return evaluate(outputs, targets, self.loss, self.combine_kept(kept), restore, self.extra_metrics)

    def learned(self, outputs: Tensor) -> Tensor:
        """Convert outputs from the original units to those that the members learnt."""
        if self.target_scaling is None:
            return outputs
        return self.loss.rescale(outputs, self.target_scaling.standardise).to(self.dtype)

    def learned_targets(self, targets: Tensor) -> Tensor:
        """Convert real targets from the original units to those that the members learnt; classes stay as they are."""
        if self.target_scaling is None or not targets.is_floating_point():
            return targets
        return self.target_scaling.standardise(targets).to(self.dtype)

    def restored(self, outputs: Tensor) -> Tensor:
        """Convert outputs to the original units, in float64 if the targets were standardised."""
        return outputs if self.target_scaling is None else self.loss.rescale(outputs, self.target_scaling.restore)
