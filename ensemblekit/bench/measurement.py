"""Measures one workload: all contestants in turn, their memory, and what `auto` would choose."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ensemblekit.bench.contestants import NAIVE, Contest, Round, contest_of, naive_apart
from ensemblekit.bench.peak_memory import PeakMemory, peak_memory
from ensemblekit.bench.timing import GemmMeter, Timing, interleaved, synchroniser
from ensemblekit.bench.workloads import Workload
from ensemblekit.engines.capabilities import fast_paths


@dataclass(frozen=True)
class Entry:
    """What was measured of one contestant, per step; or why it cannot do this work."""

    contestant: str
    timing: Timing | None = None
    ratio: float | None = None
    """How many times as long the naive way took."""
    memory: PeakMemory | None = None
    gemm_fraction: float | None = None
    """The share of the measured peak rate of matrix products that its useful arithmetic ran at."""
    cannot_run: str = ""


@dataclass(frozen=True)
class AutoChoice:
    """What `auto` would have chosen here."""

    engine: str
    seconds_of_trying: float
    times_the_best: float
    """How long a step of the chosen engine took, as a multiple of that of the fastest one."""


@dataclass(frozen=True)
class Result:
    """All that was measured of one workload."""

    workload: Workload
    entries: tuple[Entry, ...]
    auto: AutoChoice | None
    gemm_rate: float
    """The measured peak, in floating-point operations per second."""
    paths: Mapping[str, str]
    """The fast ways of running that its model supports, and why not the others."""


def measure(workload: Workload, device: torch.device, with_memory: bool) -> Result:
    """Measure everybody who can do this work on this device."""
    contest = contest_of(workload, device)
    meter = GemmMeter(device)
    # first, because a run has to choose before anything is warm
    tried, seconds_of_trying = _try_auto(contest)
    with ExitStack() as stack:
        contestants: dict[str, Round] = {NAIVE: stack.enter_context(naive_apart(workload, device))}
        contestants |= {name: make(stack) for name, make in contest.makers.items() if name != NAIVE}
        rounds = interleaved(contestants, workload.rounds, meter.measure, synchroniser(device))
    timings = {name: timing.divided_by(workload.steps) for name, timing in rounds.items()}
    flops = contest.flops_of_step() if contest.flops_of_step else 0
    entries = [
        Entry(
            name,
            timing,
            timings[NAIVE].median / timing.median,
            peak_memory(workload, name) if with_memory and device.type == "cpu" else None,
            flops / timing.median / meter.best_rate if flops else None,
        )
        for name, timing in timings.items()
    ]
    entries += [Entry(name, cannot_run=reason) for name, reason in contest.cannot_run.items()]
    auto = auto_choice(tried, seconds_of_trying, timings) if tried else None
    has_model = workload.kind != "pipeline"
    paths = fast_paths(workload.run_spec.model, workload.input_shape) if has_model else {}
    return Result(workload, tuple(entries), auto, meter.best_rate, paths)


def _try_auto(contest: Contest) -> tuple[dict[str, float], float]:
    if contest.measure_auto is None:
        return {}, 0.0
    start = time.perf_counter()
    tried = contest.measure_auto()
    return tried, time.perf_counter() - start


def auto_choice(tried: Mapping[str, float], seconds_of_trying: float, timings: Mapping[str, Timing]) -> AutoChoice:
    """The engine that `auto` chooses from what it has tried, judged by the times that were taken in turn."""
    chosen = min(tried, key=tried.__getitem__)
    best = min(timing.median for name, timing in timings.items() if name != NAIVE)
    return AutoChoice(chosen, seconds_of_trying, timings[chosen].median / best)
