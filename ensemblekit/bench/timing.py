"""Interleaved timings of several ways to do the same work, which compare even on a machine whose speed drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from ensemblekit.core.threads import num_cores, threads

GEMM_SIZE = 1024
CONVOLUTION_SHAPE = 16, 256, 16
"""Images, channels of inputs and outputs, and height and width of the outputs."""
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
    """Highest measured rate of large float32 products, with a thread for each core.

    torch computes matrix products and convolutions with different libraries (on a CPU: BLAS, often MKL, and oneDNN).
    Not each of them uses the widest instructions of every processor, so the peak is the better of a matrix product,
    1024 × 1024, and of a convolution, 3 × 3 with 256 channels, channels_last: both are nothing but products.
    """

    def __init__(self, device: torch.device) -> None:
        matrix = torch.full((GEMM_SIZE, GEMM_SIZE), 0.5, device=device)
        batch, channels, size = CONVOLUTION_SHAPE
        images = torch.full((batch, channels, size + 2, size + 2), 0.5, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        filters = torch.full((channels, channels, 3, 3), 0.5, device=device).contiguous(
            memory_format=torch.channels_last
        )
        self.products: dict[str, tuple[int, Callable[[], object]]] = {
            "matmul": (2 * GEMM_SIZE**3, lambda: matrix @ matrix),
            "convolution": (2 * batch * size**2 * 9 * channels**2, lambda: conv2d(images, filters)),
        }
        """Floating-point operations of each product, and its computation."""
        self.rates = dict.fromkeys(self.products, 0.0)
        """Highest rate of each product, in floating-point operations per second."""
        self.synchronise = synchroniser(device) or (lambda: None)

    @property
    def best_rate(self) -> float:
        """Floating-point operations per second."""
        return max(self.rates.values())

    def measure(self) -> None:
        with threads(num_cores()), torch.no_grad():
            for name, (flops, compute) in self.products.items():
                for _ in range(GEMM_REPEATS):
                    start = time.perf_counter()
                    compute()
                    self.synchronise()
                    self.rates[name] = max(self.rates[name], flops / (time.perf_counter() - start))


def count_flops(work: Callable[[], object]) -> int:
    """The floating-point operations of all matrix products and convolutions, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
