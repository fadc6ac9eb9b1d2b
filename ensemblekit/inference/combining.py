"""Combines the outputs of a trained ensemble's members, also where only the outputs are there and no network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

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
    """The number of networks; there are several outputs of each if it has several stochastic passes."""
    fitted: Tensor | None = None
    """Parameters of the combination, if a method fits them."""
    target_scaling: TargetScaling | None = None
    """How real targets were standardised; outputs are in the original units."""
    dtype: torch.dtype = torch.float32
    """The floating-point type of the networks."""
    extra_metrics: tuple[Metric, ...] = ()
    """Metrics beside the built-in ones."""

    @property
    def loss(self) -> Loss:
        """The loss that the members were trained with."""
        return self.objective.loss

    def of_size(self, num_members: int) -> Self:
        """Return the combiner for the outputs of so many of the members; not if its parameters were fitted for all."""
        return replace(self, num_members=num_members)

    def combine(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs (M, N, C), in the original units in regression, to the ensemble's (N, C)."""
        return self.restored(self.combine_learned(self.learned(outputs)))

    def combine_learned(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs as they learnt them: standardised if the targets were."""
        fitted = None if self.fitted is None else self.fitted.to(outputs)
        return self.objective.combine(outputs, fitted, passes=len(outputs) // self.num_members)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Compute the ensemble's class probabilities (N, K) from the members' outputs (M, N, C)."""
        return self.loss.probabilities(self.combine(outputs))

    def metrics(self, kept: KeptOutputs) -> dict[str, float]:
        """Compute all metrics from kept outputs: those of the run's result, by names without the prefix of a split."""
        outputs, targets = self.learned(kept.outputs), kept.targets
        if targets.is_floating_point():
            targets = self.learned(targets)
        restore = None if self.target_scaling is None else self.target_scaling.restore
        return evaluate(outputs, targets, self.loss, self.combine_learned(outputs), restore, self.extra_metrics)

    def learned(self, values: Tensor) -> Tensor:
        """Convert outputs or real targets from the original units to those that the members learnt."""
        return values if self.target_scaling is None else self.target_scaling.standardise(values).to(self.dtype)

    def restored(self, values: Tensor) -> Tensor:
        """Convert outputs or real targets to the original units, in float64 if the targets were standardised."""
        return values if self.target_scaling is None else self.target_scaling.restore(values)
