"""What members cost: parameters, or measured time."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from ensemblekit.core.errors import UsageError
from ensemblekit.inference.pooling import Candidate

Unit = Literal["parameters", "ms"]
BATCH = 250
"""Samples of the batches whose time is measured."""
REPEATS = 7
"""Batches of which the median time counts; before them, some are not counted."""
WARM_UP = 3
_BUDGET = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[0-9]+)?)\s*(parameters|ms)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """The most that chosen members may cost together."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "50000parameters" or "5ms"; a space before the unit is allowed."""
        match = _BUDGET.fullmatch(text)
        amount = float(re.sub("[_,]", "", match[1])) if match else 0.0
        if match is None or amount <= 0:
            fix = "write a number and its unit: 50000parameters, or 5ms for the time of 1,000 predictions"
            raise UsageError(f'"{text}" is not a budget', "--budget", fix)
        return cls(amount, "ms" if match[2].lower() == "ms" else "parameters")

    def __str__(self) -> str:
        return f"{self.amount:,.10g} {self.unit}" + (" for 1,000 predictions" if self.unit == "ms" else "")


class Costs:
    """What each of some candidates costs in the unit of a budget, and whether some of them are within it.

    Args:
        candidates: the members to choose from.
        budget: None: nothing is measured, and everything is within the budget.

    Raises:
        UsageError: not a single member is within the budget.
    """

    def __init__(self, candidates: Sequence[Candidate], budget: Budget | None) -> None:
        self.budget, self.each = budget, [0.0] * len(candidates)
        if budget is None:
            return
        measured = budget.unit == "ms"
        self.each = milliseconds(candidates) if measured else [float(one.parameters) for one in candidates]
        if min(self.each) > budget.amount:
            what = f"no member is within the budget of {budget}: the cheapest costs {min(self.each):,.4g} {budget.unit}"
            raise UsageError(what, "--budget", "raise it, or choose from runs of smaller models")

    def total(self, members: Collection[int]) -> float:
        """Return what members cost together."""
        return sum(self.each[member] for member in members)

    def affords(self, members: Collection[int]) -> bool:
        """Whether members are within the budget."""
        return self.budget is None or self.total(members) <= self.budget.amount


def milliseconds(candidates: Sequence[Candidate]) -> list[float]:
    """Measure how long 1,000 predictions of each member take here on the CPU, by itself, without reading files."""
    found = []
    for candidate in candidates:
        ensemble = candidate.run.ensemble
        inputs = torch.randn(BATCH, *ensemble.info.input_shape, generator=torch.Generator().manual_seed(0))
        times = []
        for _ in range(WARM_UP + REPEATS):
            started = time.perf_counter()
            ensemble.network_outputs(inputs, networks=[candidate.network])
            times.append(time.perf_counter() - started)
        found.append(1e6 * median(times[WARM_UP:]) / BATCH)
    return found
