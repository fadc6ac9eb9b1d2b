"""Model selection by validation loss: which epoch is the best, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ModelSelection:
    """The lowest validation loss so far, and for how many evaluations there was no lower one.

    Args:
        patience: evaluations without a lower loss after which training stops; None: it never stops early.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best_loss, self.evaluations_since_best = math.inf, 0

    def is_best(self, row: Mapping[str, Any]) -> bool:
        """Count an epoch and return whether it is the best so far; nan is never the best."""
        loss = row.get("validation_loss")
        if loss is None:
            return False
        if loss < self.best_loss:
            self.best_loss, self.evaluations_since_best = loss, 0
            return True
        self.evaluations_since_best += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether training stops early."""
        return self.patience is not None and self.evaluations_since_best >= self.patience

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        best_loss = self.best_loss if math.isfinite(self.best_loss) else None
        return {"best_loss": best_loss, "since_best": self.evaluations_since_best}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.best_loss = math.inf if state["best_loss"] is None else state["best_loss"]
        self.evaluations_since_best = state["since_best"]
