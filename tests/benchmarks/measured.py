"""What a row of the performance targets is, and what several rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fitting import CPU, chosen_engine

from ensemblekit.bench.contestants import NAIVE, contest_of, naive_apart
from ensemblekit.bench.timing import Timing, interleaved
from ensemblekit.bench.workloads import Workload, all_workloads


@dataclass(frozen=True)
class Options:
    """What all rows are told."""

    smoke: bool
    cifar100: Path | None = None


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
    """A workload of `ensemblekit bench`; with --smoke small enough for seconds: it shows that it runs, not how fast."""
    full = all_workloads()[name]
    if not options.smoke:
        return full
    small = replace(full, batch_size=8, steps=1, rounds=1)
    return small.changed(ensemble={"members": 2}) if "ensemble" in full.spec else small


def faster(work: str, against: str, asked: str, theirs: Timing, ours: Timing, note: str) -> Measured:
    """How many times as long the other took: of the medians, and the least and most of any round."""
    by_round = ours.times_faster(theirs)
    return Measured(work, against, asked, theirs.median / ours.median, min(by_round), max(by_round), note)


def duel(here: Workload, ours: str) -> tuple[Timing, Timing]:
    """The loop written by hand, in a process of its own, and one other contestant, in turn."""
    with ExitStack() as stack:
        naive = stack.enter_context(naive_apart(here, CPU))
        mine = contest_of(here, CPU).makers[ours](stack)
        timings = interleaved({NAIVE: naive, ours: mine}, here.rounds)
    return timings[NAIVE], timings[ours]


def against_naive(name: str, work: str, asked: str, options: Options, against: str = "naive loop") -> Measured:
    """Steps of training by the engine that `auto` chooses."""
    here = workload(name, options)
    engine = chosen_engine(here)
    return faster(work, against, asked, *duel(here, engine), f"engine {engine}")
