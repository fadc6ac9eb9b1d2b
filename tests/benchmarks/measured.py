"""A row of the performance targets, and the measurements that several rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fitting import CPU, chosen_engine

from ensemblekit.bench.contestants import NAIVE, contest_of, naive_subprocess
from ensemblekit.bench.timing import Timing, interleaved
from ensemblekit.bench.workloads import Workload, all_workloads


@dataclass(frozen=True)
class Options:
    """Options of every row."""

    smoke: bool
    cifar100: Path | None = None
    jax_python: Path | None = None
    """The interpreter of an environment with JAX."""


@dataclass(frozen=True)
class Measured:
    """One line of the results."""

    work: str
    against: str
    asked: str
    ratio: float
    low: float
    high: float
    note: str = ""


Row = Callable[[Options], Iterator[Measured]]


def workload(name: str, options: Options) -> Workload:
    """A workload of `ensemblekit bench`; with --smoke so small that it only shows that it runs."""
    full = all_workloads()[name]
    if not options.smoke:
        return full
    small = replace(full, batch_size=8, steps=1, rounds=1)
    return small.changed(ensemble={"members": 2}) if "ensemble" in full.spec else small


def ratios(slow: Timing, fast: Timing) -> list[float]:
    """How many times as long one took as the other, round by round: they are neighbours in time, so drift cancels."""
    return [one / other for one, other in zip(slow.seconds, fast.seconds, strict=True)]


def faster(work: str, against: str, asked: str, theirs: Timing, ours: Timing, note: str) -> Measured:
    """The speed-up over another implementation: of the medians, and its least and greatest value in any round."""
    by_round = ratios(theirs, ours)
    return Measured(work, against, asked, theirs.median / ours.median, min(by_round), max(by_round), note)


def duel(here: Workload, ours: str) -> tuple[Timing, Timing]:
    """Timings of the hand-written loop, in a process of its own, and of one other contestant."""
    with ExitStack() as stack:
        naive = stack.enter_context(naive_subprocess(here, CPU))
        mine = contest_of(here, CPU).makers[ours](stack)
        timings = interleaved({NAIVE: naive, ours: mine}, here.rounds)
    return timings[NAIVE], timings[ours]


def against_naive(name: str, work: str, asked: str, options: Options, against: str = "naive loop") -> Measured:
    """Training steps by the engine that `auto` chooses, against the hand-written loop."""
    here = workload(name, options)
    engine = chosen_engine(here)
    return faster(work, against, asked, *duel(here, engine), f"engine {engine}")
