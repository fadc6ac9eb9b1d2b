"""Measures one workload: all contestants in turn, their memory, and the choice of `auto`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ensemblekit.bench.contestants import NAIVE, Contest, Round, contest_of, naive_subprocess
from ensemblekit.bench.peak_memory import ROUNDS as MEMORY_ROUNDS
from ensemblekit.bench.peak_memory import peak_memory
from ensemblekit.bench.progress import Report, RoundClock, unreported
from ensemblekit.bench.timing import GemmMeter, Timing, interleaved, synchroniser
from ensemblekit.bench.workloads import Workload
from ensemblekit.engines.capabilities import capabilities

START_SECONDS = 5.0
"""About how long a new process takes until it measures: for estimates of the remaining time."""


@dataclass(frozen=True)
class Entry:
    """Measurements of one contestant, per step; or why it cannot run the workload."""

    contestant: str
    timing: Timing | None = None
    ratio: float | None = None
    """Speed-up over the naive loop: its median time divided by this one's."""
    memory: int | None = None
    """Growth of resident memory, in bytes."""
    gemm_fraction: float | None = None
    """Rate of useful floating-point operations as a fraction of the measured peak rate (see `GemmMeter`)."""
    cannot_run: str = ""


@dataclass(frozen=True)
class AutoChoice:
    """The engine that `auto` would have chosen."""

    engine: str
    seconds_of_trying: float
    """How long its measurements took."""
    times_the_best: float
    """Time of a step of the chosen engine as a multiple of the fastest engine's."""


@dataclass(frozen=True)
class Result:
    """All measurements of one workload."""

    workload: Workload
    entries: tuple[Entry, ...]
    auto: AutoChoice | None
    gemm_rate: float
    """Peak rate of matrix products or convolutions, in floating-point operations per second."""
    paths: Mapping[str, str]
    """The fast execution paths that the model supports, and why not the others."""


def measure(workload: Workload, device: torch.device, with_memory: bool, report: Report = unreported) -> Result:
    """Measure all contestants of a workload.

    Args:
        workload: What to run.
        device: Where to run it.
        with_memory: Also measure peak memory, each contestant in a new process; on the CPU only.
        report: Told what is measured now and how long the rest takes.
    """
    contest = contest_of(workload, device)
    meter = GemmMeter(device)
    with_memory = with_memory and device.type == "cpu"
    number = len(contest.makers) * with_memory
    report("choice of auto", None)
    # first, because a run chooses its engine before caches are warm
    chosen, seconds = _choose_as_auto(contest)
    with ExitStack() as stack:
        contestants: dict[str, Round] = {NAIVE: stack.enter_context(naive_subprocess(workload, device))}
        contestants |= {name: make(stack) for name, make in contest.makers.items() if name != NAIVE}
        clock = RoundClock(workload.rounds, report, lambda seconds: _seconds_of_memory(seconds, workload, number))

        def between() -> None:
            meter.measure()
            clock.round_finished()

        rounds = interleaved(contestants, workload.rounds, between, synchroniser(device))
    timings = {name: timing.divided_by(workload.steps) for name, timing in rounds.items()}
    memory = _measure_memory(workload, timings, report) if with_memory else {}
    flops = contest.flops_of_step() if contest.flops_of_step else 0
    entries = [
        Entry(
            name,
            timing,
            timings[NAIVE].median / timing.median,
            memory.get(name),
            flops / timing.median / meter.best_rate if flops else None,
        )
        for name, timing in timings.items()
    ]
    entries += [Entry(name, cannot_run=reason) for name, reason in contest.cannot_run.items()]
    auto = auto_choice(chosen, seconds, timings) if chosen else None
    has_model = workload.kind != "pipeline"
    paths = capabilities(workload.run_spec.model, workload.input_shape) if has_model else {}
    return Result(workload, tuple(entries), auto, meter.best_rate, paths)


def _measure_memory(workload: Workload, timings: Mapping[str, Timing], report: Report) -> dict[str, int]:
    """Measure the peak memory of each contestant."""
    memory = {}
    for index, name in enumerate(timings):
        left = list(timings.values())[index:]
        seconds_of_round = workload.steps * sum(timing.median for timing in left)
        report(f"memory of {name}", _seconds_of_memory(seconds_of_round, workload, len(left)))
        memory[name] = peak_memory(workload, name)
    return memory


def _seconds_of_memory(seconds_of_round: float, workload: Workload, number: int) -> float:
    """Estimate how long it takes to measure the memory of so many contestants, from the time of a round of them."""
    return number * START_SECONDS + (MEMORY_ROUNDS * seconds_of_round / workload.steps if number else 0.0)


def _choose_as_auto(contest: Contest) -> tuple[str, float]:
    """The name of the engine that `auto` chooses, and the seconds that it takes to choose; "" for other work."""
    if contest.choose_engine is None:
        return "", 0.0
    start = time.perf_counter()
    choice = contest.choose_engine()
    return choice.engine, time.perf_counter() - start


def auto_choice(chosen: str, seconds: float, timings: Mapping[str, Timing]) -> AutoChoice:
    """The engine that `auto` has chosen, judged by the interleaved timings."""
    best = min(timing.median for name, timing in timings.items() if name != NAIVE)
    return AutoChoice(chosen, seconds, timings[chosen].median / best)
