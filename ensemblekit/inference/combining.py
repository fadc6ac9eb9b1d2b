"""Combines the outputs of a trained ensemble's members, also where only the outputs are there and no network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ensemblekit.core.errors import UsageError
from ensemblekit.core.hooks import DEFAULTS
from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import Metric, evaluate
from ensemblekit.core.objective import Objective
from ensemblekit.core.out_of_fold import combine_held_out, out_of_fold_metrics
from ensemblekit.core.plugin import Combination
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.inference.calibration import LEAST_LOG, Calibration, scaled
from ensemblekit.inference.conformal import Conformal
from ensemblekit.inference.coverage import measure_coverage
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
    calibration: Calibration | None = None
    """What is done to the outputs so that the probabilities they mean are calibrated; `combine` includes it."""
    conformal: Conformal | None = None
    """Prediction sets or intervals with a guaranteed coverage, if the run has them."""

    @property
    def name(self) -> str:
        """The name of what combines: of a combiner, a method or an auxiliary group; "mean" is the default."""
        if self.objective.predictor is not None:
            return self.objective.predictor
        name: str = self._combining.plugin_name
        return "mean" if name == DEFAULTS else name

    @property
    def is_chosen(self) -> bool:
        """Whether a combiner was chosen, so that it is not the methods that combine."""
        return self.objective.predictor is None and isinstance(self._combining.plugin, Combination)

    @property
    def mixes_probabilities(self) -> bool:
        """Whether the ensemble is a mixture of its members: their probabilities, not their outputs, are averaged."""
        return self.objective.predictor is None and getattr(self._combining.plugin, "mixes_probabilities", False)

    @property
    def _combining(self) -> Any:
        """The implementation of `combine` that counts: the one registered last."""
        return self.objective.final_hooks.call.combine.get_hookimpls()[-1]

    @property
    def loss(self) -> Loss:
        """The loss that the members were trained with."""
        return self.objective.loss

    def of_size(self, num_members: int) -> Self:
        """Return the combiner for the outputs of so many of the members; not if its parameters were fitted for all.

        It is not calibrated: a calibration is that of all members.
        """
        return replace(self, num_members=num_members, indices=None, calibration=None, conformal=None)

    def uncalibrated(self) -> Self:
        """Return the combiner without calibration, prediction sets and intervals."""
        return replace(self, calibration=None, conformal=None)

    @property
    def needs_all_members(self) -> bool:
        """Whether it is only defined for the outputs of all members: of some, it would be another combination."""
        return self.fitted is not None or self.objective.combines_more

    @property
    def description(self) -> str:
        """What was added after training, in a few words; empty if nothing was."""
        parts = [] if self.calibration is None else [f"calibrated: {self.calibration.description}"]
        parts += [] if self.conformal is None else [self.conformal.description]
        return f"{', '.join(parts)}, for the combiner {self.name}" if parts else ""

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
        if self.calibration is None:
            return self.objective.predict(outputs, fitted, passes, indices)
        if self.calibration.member_temperatures:
            temperatures = torch.tensor(self.calibration.member_temperatures).to(outputs)
            outputs = self.scaled_networks(outputs, temperatures, passes)
        return self.calibration.calibrated(self.objective.predict(outputs, fitted, passes, indices))

    def scaled_networks(self, outputs: Tensor, temperatures: Tensor, passes: int) -> Tensor:
        """Divide the members' logits among the outputs of all networks (S · R, N, W) by temperatures (1,) or (M,)."""
        layout = self.objective.prediction_layout
        width = outputs.shape[-1] if layout is None else layout.num_outputs
        networks = outputs.unflatten(0, (passes, -1))
        members = scaled(networks[:, : self.num_members, :, :width], temperatures, self.loss)
        if members.shape == networks.shape:
            return members.flatten(0, 1)
        first = torch.cat([members, networks[:, : self.num_members, :, width:]], dim=-1)
        return torch.cat([first, networks[:, self.num_members :]], dim=1).flatten(0, 1)

    def combine_kept(self, kept: KeptOutputs) -> Tensor:
        """Combine kept outputs, in the original units in regression, to the ensemble's outputs as it learnt them.

        Out-of-fold outputs are combined without what was fitted for all members: weights, calibration.
        """
        if kept.members is not None:
            return self._combine_held_out(kept, kept.members)
        if kept.networks is None:
            return self.combine_learned(self.learned(kept.outputs))
        return self.combine_networks(kept.networks, len(kept.outputs) // self.num_members)

    def _combine_held_out(self, kept: KeptOutputs, members: Tensor) -> Tensor:
        passes = len(kept.outputs) // len(members)
        outputs = self.learned(kept.outputs) if kept.networks is None else kept.networks
        return combine_held_out(
            outputs, members, lambda some, indices: self.objective.predict(some, None, passes, indices), passes
        )

    def predictions(self, kept: KeptOutputs) -> Tensor:
        """Compute the ensemble's probabilities (N, K), or values (N, C) in the original units, from kept outputs."""
        combined = self.combine_kept(kept)
        return self.restored(combined) if self.loss.takes == "values" else self.loss.probabilities(combined)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Compute the ensemble's class probabilities (N, K) from the members' outputs (M, N, C)."""
        return self.loss.probabilities(self.combine(outputs))

    def log_probabilities(self, kept: KeptOutputs) -> Tensor:
        """Compute the logarithms of the ensemble's class probabilities (N, K) from kept outputs, in float64."""
        return self.loss.log_probabilities(self.combine_kept(kept).double()).clamp_min(LEAST_LOG)

    def metrics(self, kept: KeptOutputs) -> dict[str, float]:
        """Compute all metrics from kept outputs: those of the run's result, by names without the prefix of a split."""
        outputs, targets = self.learned(kept.outputs), self.learned_targets(kept.targets)
        restore = None if self.target_scaling is None else self.target_scaling.restore
        combined = self.combine_kept(kept)
        if kept.members is not None:
            return out_of_fold_metrics(outputs, combined, kept.members, targets, self.loss, restore, self.extra_metrics)
        metrics = evaluate(outputs, targets, self.loss, combined, restore, self.extra_metrics)
        coverage = measure_coverage(self, outputs, combined, targets)
        return metrics if coverage is None else metrics | coverage.metrics()

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
