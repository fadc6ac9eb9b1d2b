"""Notices an objective that has no lower bound: the diversity term exceeds what the members lose by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnboundedObjective:
    """Looks at the metrics of each epoch; says something at most once.

    Args:
        is_separable: whether members do not depend on each other, so that no diversity term is minimised.
    """

    def __init__(self, is_separable: bool) -> None:
        self.is_decided = is_separable

    def notice(self, row: Mapping[str, Any]) -> str | None:
        """Return what to tell the user about an epoch, from its metrics."""
        if self.is_decided:
            return None
        objective, diversity = row.get("train_objective"), row.get("test_diversity")
        loss = row.get("test_mean_member_loss", row.get("mean_member_loss"))
        if objective is not None and objective < 0:
            what = f"the objective is below zero ({objective:.3g})"
        elif diversity is not None and loss is not None and diversity > loss:
            what = f"the diversity term exceeds the members' loss ({diversity:.3g} against {loss:.3g})"
        else:
            return None
        self.is_decided = True
        return f"{what} since epoch {row['epoch']}: members may drift apart without end; weight diversity less"
