"""The best group of a comparison within limits, such as a training time, and the commands that lead on from it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemblekit.analysis.table_formats import title_of
from ensemblekit.core.errors import UsageError, choices, did_you_mean

if TYPE_CHECKING:
    from ensemblekit.analysis.comparison import Comparison, Group

OUT = "runs/chosen"
"""The run directory in the commands."""


@dataclass(frozen=True)
class Choice:
    """A group of runs that was chosen on validation data."""

    group: Group
    metric: str
    """The validation metric that decided."""
    value: float
    """Its mean over the runs."""
    considered: int
    """How many groups are within the limits."""
    commands: tuple[str, ...]
    """Shell commands that train the spec again, calibrate it, add prediction sets or intervals, and export it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        return {
            "group": self.group.label,
            self.metric: self.value,
            "groups_within_limits": self.considered,
            "commands": list(self.commands),
        }


def best_within(comparison: Comparison, limits: Mapping[str, float]) -> Choice:
    """Choose the group with the best validation metric among those whose measures are within limits.

    Test data does not decide, so that the test metrics of the chosen group stay honest.

    Args:
        comparison: the groups.
        limits: the largest mean of a measure by its name, such as training_seconds.

    Raises:
        UsageError: a measure that the comparison does not have, a limit that is not a number, no group within the
            limits, or runs without validation data.
    """
    for name, limit in limits.items():
        if name not in comparison.columns:
            fix = did_you_mean(name, comparison.columns) or choices(name, comparison.columns)
            raise UsageError(f'the comparison has no measure "{name}"', "limits", fix)
        if math.isnan(limit):
            raise UsageError("the limit is not a number", name, "give a number")
    within = [group for group in comparison.groups if _is_within(group, limits)]
    if not within:
        least = ", ".join(f"{title_of(name)}: {_least(comparison, name):.4g}" for name in limits)
        raise UsageError("no group is within the limits", "limits", f"raise them; the smallest values are {least}")
    metric = f"validation_{comparison.primary}"
    if missing := [run.path for group in within for run in group.runs if metric not in run.validation]:
        fix = "hold some training data out (data.validation_fraction), since test data must not choose"
        raise UsageError("the run has no validation metrics", str(missing[0]), fix)
    sign = 1 if comparison.primary == "accuracy" else -1
    best = max(within, key=lambda group: sign * _mean(group, metric))
    return Choice(best, metric, _mean(best, metric), len(within), _commands(best, comparison.primary == "accuracy"))


def _is_within(group: Group, limits: Mapping[str, float]) -> bool:
    return all(name in group.cells and group.cells[name].mean <= limit for name, limit in limits.items())


def _least(comparison: Comparison, name: str) -> float:
    return min(group.cells[name].mean for group in comparison.groups if name in group.cells)


def _mean(group: Group, metric: str) -> float:
    return sum(run.validation[metric] for run in group.runs) / len(group.runs)


def _commands(group: Group, has_classes: bool) -> tuple[str, ...]:
    spec = shlex.quote(str(group.runs[0].path / "spec.toml"))
    calibrate = (f"ensemblekit calibrate {OUT}",) if has_classes else ()
    return (
        f"ensemblekit train {spec} --out {OUT}",
        *calibrate,
        f"ensemblekit conform {OUT}",
        f"ensemblekit export {OUT}",
    )
