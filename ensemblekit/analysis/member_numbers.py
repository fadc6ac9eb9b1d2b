"""How many members an ensemble needs: smaller ensembles of its members, compared with all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemblekit.analysis.bootstrap import Interval, mean_interval
from ensemblekit.analysis.measures import Quantities
from ensemblekit.core.seeds import generator
from ensemblekit.core.tasks import task_of

if TYPE_CHECKING:
    from ensemblekit.inference.combining import Combiner
    from ensemblekit.runs.outputs import KeptOutputs

CHOICES = 8
"""Random choices of members for each size."""
WORTH_SAVING = 0.25
"""Least share of the members whose saving is worth a word."""
ACCURACY_TOLERANCE = 0.005
"""Gain in accuracy that does not count: half a percentage point."""
LOSS_TOLERANCE = 0.01
"""Relative gain in loss that does not count."""


@dataclass(frozen=True)
class SmallerEnsemble:
    """The smallest number of members that does as well as all of them, and what all of them gain at most."""

    size: int
    num_members: int
    loss_gain: Interval
    """Relative to the loss of all members."""
    accuracy_gain: Interval | None = None
    """None in regression."""

    @property
    def gain_texts(self) -> list[tuple[str, str]]:
        """What is improved, and by how much at most."""
        loss = ("loss", f"{100 * max(self.loss_gain.high, 0.0):.2f} %")
        if self.accuracy_gain is None:
            return [loss]
        return [("accuracy", f"{100 * max(self.accuracy_gain.high, 0.0):.2f} points"), loss]

    @property
    def figures(self) -> dict[str, float]:
        """The ends of the intervals by name."""
        found = {"loss_gain_low": self.loss_gain.low, "loss_gain_high": self.loss_gain.high}
        if self.accuracy_gain is not None:
            found |= {"accuracy_gain_low": self.accuracy_gain.low, "accuracy_gain_high": self.accuracy_gain.high}
        return found

    @property
    def rule(self) -> str:
        """When the last members are superfluous."""
        accuracy = "" if self.accuracy_gain is None else f"of accuracy at most {100 * ACCURACY_TOLERANCE:g} points, "
        return f"upper ends of the intervals of their gain: {accuracy}of loss at most {100 * LOSS_TOLERANCE:g} %"


@torch.no_grad()
def smallest_equal_ensemble(kept: KeptOutputs, combiner: Combiner) -> SmallerEnsemble | None:
    """Find the smallest number of members, chosen at random, that does as well as all of them within a tolerance.

    Args:
        kept: outputs and targets.
        combiner: how the outputs are combined.

    Returns:
        None if more than three quarters of the members are needed, if noise hides whether they are, or if members
        cannot be left out: of one, of several stochastic passes, or with weights that were fitted to all of them.
    """
    num_members = len(kept.outputs)
    if num_members < 2 or num_members != combiner.num_members or combiner.needs_all_members or len(kept) < 2:
        return None
    outputs, targets = combiner.learned(kept.outputs), combiner.learned_targets(kept.targets)
    whole = _quantities(outputs, targets, combiner)
    low, high, found = 1, max(1, int((1 - WORTH_SAVING) * num_members)), None
    while low <= high:  # bisection: more members are hardly ever worse
        size = (low + high) // 2
        candidate = _compare(size, outputs, targets, combiner, whole)
        if candidate is not None:
            found, high = candidate, size - 1
        else:
            low = size + 1
    return found


def _compare(
    size: int, outputs: Tensor, targets: Tensor, combiner: Combiner, whole: Quantities
) -> SmallerEnsemble | None:
    """Compare ensembles of some size with the whole one; None unless they are as good."""
    smaller = combiner.of_size(size)
    random = generator(0, "choices of members", size)
    choices = [torch.randperm(len(outputs), generator=random)[:size] for _ in range(CHOICES)]
    parts = [_quantities(outputs[choice], targets, smaller) for choice in choices]
    gains = {name: torch.stack([part[name] for part in parts]).mean(dim=0) - whole[name] for name in whole}
    scale = max(abs(float(whole["loss"].mean())), 1e-12)
    loss = mean_interval(gains["loss"] / scale)
    accuracy = -mean_interval(gains["correct"]) if "correct" in gains else None
    if loss.high > LOSS_TOLERANCE or (accuracy is not None and accuracy.high > ACCURACY_TOLERANCE):
        return None
    return SmallerEnsemble(size, len(outputs), loss, accuracy)


def _quantities(outputs: Tensor, targets: Tensor, combiner: Combiner) -> Quantities:
    """Return the loss of each sample and, for classes and labels, whether its prediction is correct."""
    loss, combined = combiner.loss, combiner.combine_learned(outputs)
    found = {"loss": loss(combined, targets)}
    correct = task_of(loss, combined, targets).correct(combined, targets, loss)
    return found if correct is None else found | {"correct": correct.float()}
