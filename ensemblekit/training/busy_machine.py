"""Notices that other programs use the cores that training needs: threads then get less time than they ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ensemblekit.core.threads import num_cores
from ensemblekit.engines.base import Engine

MEASURED_SECONDS = 5.0
"""Steps are measured until they have taken so long together; then it is decided once."""
BUSY_SHARE = 0.6
"""A share of the expected processor time below which the machine counts as busy."""


class BusyMachine:
    """Compares the processor time of the first steps with the time that passes; costs two readings of a clock each."""

    def __init__(self, device: torch.device) -> None:
        self.is_decided = device.type != "cpu"
        self.wall = self.processor = 0.0

    @contextmanager
    def step(self, engine: Engine) -> Iterator[None]:
        """Measure a step of an engine."""
        if self.is_decided:
            yield
            return
        clock = time.process_time if _num_workers(engine) > 1 else time.thread_time
        wall, processor = time.perf_counter(), clock()
        yield
        self.wall += time.perf_counter() - wall
        self.processor += clock() - processor

    def notice(self, engine: Engine) -> str | None:
        """Return what to tell the user, at most once and only if the machine is busy."""
        if self.is_decided or self.wall < MEASURED_SECONDS:
            return None
        self.is_decided = True
        share = self.processor / (self.wall * _expected_threads(engine))
        if share >= BUSY_SHARE:
            return None
        text = f"the machine is busy with other work: training gets {100 * share:.0f} % of the processor time it needs"
        if torch.get_num_threads() > 1 and _num_workers(engine) == 1 and not engine.limits_threads:
            return f"{text}; fewer threads wait less for each other: set OMP_NUM_THREADS=1, or engine.name=threaded"
        return f"{text}; run fewer jobs at once"


def _num_workers(engine: Engine) -> int:
    """Return how many threads compute members at the same time."""
    return max(min(len(engine.active), num_cores()), 1) if engine.name == "threaded" else 1


def _expected_threads(engine: Engine) -> float:
    """Return the mean number of threads that compute in a step on an idle machine, at least."""
    workers = _num_workers(engine)
    rounds = -(-len(engine.active) // workers)
    return len(engine.active) / rounds if workers > 1 else 1.0
