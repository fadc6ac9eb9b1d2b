"""Picks an engine by trying each that can run, on real batches and copies of the members."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from ensemblekit.data import Batch
from ensemblekit.engines import ENGINES, Engine, Settings, Slot, unsupported
from ensemblekit.objectives import Objective

ORDER = ("threaded", "stacked", "sequential")
FEW_SAMPLES = 8
HOPELESS = 3.0
"""An engine that takes so many times as long as the best for a few samples is not tried on a whole batch."""


def measure_engines(
    slots: Sequence[Slot],
    objective: Objective,
    settings: Settings,
    optimizer: str,
    batch: Batch,
    weights: Tensor | None,
) -> dict[str, float]:
    """Seconds per step of each engine that can run these slots; one that runs out of memory is left out."""
    few = Batch(batch.inputs[:FEW_SAMPLES], batch.targets[:FEW_SAMPLES], batch.index[:FEW_SAMPLES])
    few_weights = None if weights is None else weights[:FEW_SAMPLES]
    seconds: dict[str, float] = {}
    best_of_few = float("inf")
    for name in ORDER:
        if unsupported(name, slots, settings, optimizer) is not None:
            continue
        engine = ENGINES[name](deepcopy(list(slots)), objective, settings)
        try:
            of_few = _seconds(engine, few, few_weights)
            best_of_few = min(best_of_few, of_few)
            if of_few <= HOPELESS * best_of_few:
                seconds[name] = _seconds(engine, batch, weights)
        except (MemoryError, torch.OutOfMemoryError):
            continue
        finally:
            engine.close()
    return seconds


def _seconds(engine: Engine, batch: Batch, weights: Tensor | None) -> float:
    """The time of the better of two steps; the one before them pays for what is set up once."""
    times = []
    for step in range(3):
        start = time.perf_counter()
        engine.train_step(batch, weights, 0.0, step)
        if engine.settings.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
