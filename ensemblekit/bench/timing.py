"""Interleaved timings of several ways to do the same work, which compare even on a machine whose speed drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from ensemblekit.core.threads import num_cores, threads

GEMM_SIZE = 1024
GEMM_REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds that one contestant took in each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        if len(self.seconds) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (upper - lower) / 2

    def divided_by(self, count: int) -> Timing:
        """The timing of one of `count` equal parts of the work."""
        return Timing(tuple(seconds / count for seconds in self.seconds))


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    between: Callable[[], object] | None = None,
    synchronise: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time contestants in turn, A B A B …, after each has run once to warm up.

    Args:
        contestants: What to call, by name.
        rounds: Timed calls of each contestant.
        between: Called after each round.
        synchronise: Waits for a device that computes asynchronously.

    Returns:
        The seconds of every round, by name.
    """
    wait = synchronise or (lambda: None)
    for work in contestants.values():
        work()
        wait()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            start = time.perf_counter()
            work()
            wait()
            seconds[name].append(time.perf_counter() - start)
        if between is not None:
            between()
    return {name: Timing(tuple(measured)) for name, measured in seconds.items()}


def synchroniser(device: torch.device) -> Callable[[], object] | None:
    """A function that waits for the device; None for a CPU, which computes synchronously."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.synchronize


class GemmMeter:
    """Highest measured rate of float32 matrix products of 1024 × 1024, with a thread for each core."""

    def __init__(self, device: torch.device) -> None:
        self.matrix = torch.full((GEMM_SIZE, GEMM_SIZE), 0.5, device=device)
        self.synchronise = synchroniser(device) or (lambda: None)
        self.best_rate = 0.0
        """Floating-point operations per second."""

    def measure(self) -> None:
        with threads(num_cores()):
            for _ in range(GEMM_REPEATS):
                start = time.perf_counter()
                self.matrix @ self.matrix
                self.synchronise()
                self.best_rate = max(self.best_rate, 2 * GEMM_SIZE**3 / (time.perf_counter() - start))


def count_flops(work: Callable[[], object]) -> int:
    """The floating-point operations of all matrix products and convolutions, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
