"""Times of several ways to do the same work, taken in turn: only those compare on a machine whose speed drifts."""

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
    """How long one contestant took, round by round."""

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
        """The same for each of `count` equal parts of the work."""
        return Timing(tuple(seconds / count for seconds in self.seconds))

    def times_faster(self, other: Timing) -> tuple[float, ...]:
        """How many times as long the other took in each round: its neighbours in time, so drift cancels."""
        return tuple(theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True))


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    between: Callable[[], object] | None = None,
    synchronise: Callable[[], object] | None = None,
    prepare: Callable[[str], object] | None = None,
    warm_up: bool = True,
) -> dict[str, Timing]:
    """Run A B A B … for that many rounds, after each has run once to warm up (which long work does by itself).

    `between` is called after each round; `synchronise` waits for a device that computes on its own; `prepare` is
    called with a contestant's name ahead of its turn, which its time does not include.
    """
    wait = synchronise or (lambda: None)
    get_ready = prepare or (lambda name: None)
    for name, work in contestants.items() if warm_up else ():
        get_ready(name)
        work()
        wait()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            get_ready(name)
            start = time.perf_counter()
            work()
            wait()
            seconds[name].append(time.perf_counter() - start)
        if between is not None:
            between()
    return {name: Timing(tuple(measured)) for name, measured in seconds.items()}


def synchroniser(device: torch.device) -> Callable[[], object] | None:
    """What waits for the device; None on a CPU, which never runs ahead."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.synchronize


class GemmMeter:
    """The best rate of float32 matrix products of 1024² that this machine has shown, with a thread for each core."""

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
