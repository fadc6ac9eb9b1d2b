"""Rows about the choice of `auto`: on an idle machine and beside a busy process, judged in the same state of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial

from fitting import CPU, timed_in_turn
from measured import Measured, Options, Row, workload
from rows_against_others import busy_core

from ensemblekit.bench.contestants import NAIVE, contest_of
from ensemblekit.bench.subprocesses import SubprocessContestant
from ensemblekit.bench.workloads import Workload, all_workloads
from ensemblekit.core.memory import keep_freed_memory

REPETITIONS = 5
"""Choices in each of the two states of the machine, each in a process of its own."""
ROUNDS = 3
"""Of the judge after each choice."""
LARGE_ROUNDS = 1
"""The same for workloads whose steps take seconds."""
GOOD_RATIO = 1.1


class Chooser:
    """Chooses an engine in a process of its own, as a run does before anything is warm."""

    def __init__(self, chosen_for: Workload) -> None:
        keep_freed_memory()
        self.contest = contest_of(chosen_for, CPU)

    def __call__(self) -> tuple[str, float]:
        """Return the name of the engine and the seconds that the choice took."""
        start = time.perf_counter()
        choice = self.contest.choose_engine()
        return choice.engine, time.perf_counter() - start


def training_by(engine: str, here: Workload) -> Callable[[], object]:
    """A round of training steps by an engine."""
    return contest_of(here, CPU).makers[engine](ExitStack())


def choices(here: Workload, repetitions: int, rounds: int) -> Iterator[tuple[str, float, float]]:
    """The engine that is chosen in each repetition, its time as a multiple of the best engine's, and the seconds.

    The judge is the median time of each engine in the present state of the machine. As in a run, each engine has a
    process to itself, with the settings of the command line (targets.py limits spinning in each process that it
    starts): in one process, the threads of one engine's operations would disturb those of the next. Rounds in which the
    engines take turns follow each choice, so that the choices and their judge see the same drift of the machine's
    speed; how threads are placed on cores makes some engines several times slower for seconds, which a few rounds in a
    row could miss or take for the rule.
    """
    names = [name for name in contest_of(here, CPU).makers if name != NAIVE]
    chosen: list[tuple[str, float]] = []
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(SubprocessContestant(partial(training_by, name, here))) for name in names}
        for train in engines.values():
            train()
        for _ in range(repetitions):
            with SubprocessContestant(partial(Chooser, here)) as chooser:
                chosen.append(chooser())
            for name, timing in timed_in_turn(engines, rounds).items():
                seconds[name] += timing.seconds
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for engine, trying in chosen:
        yield engine, medians[engine] / min(medians.values()), trying


def auto(names: list[str], options: Options) -> Iterator[Measured]:
    """One line for each workload, and one for all of them if there are several."""
    repetitions = 1 if options.smoke else REPETITIONS
    everything: list[float] = []
    for name in names:
        here, of_workload, slowest, engines = workload(name, options), [], 0.0, []
        rounds = 1 if options.smoke else LARGE_ROUNDS if name.startswith("real") else ROUNDS
        for state in (nullcontext(), busy_core()):
            with state:
                for engine, ratio, trying in choices(here, repetitions, rounds):
                    of_workload.append(ratio)
                    engines.append(engine)
                    slowest = max(slowest, trying)
        taken = ", ".join(f"{engine} {engines.count(engine)} times" for engine in dict.fromkeys(engines))
        everything += of_workload
        work, note = f"auto, {name}, half of the time with a busy core", f"{taken}; {good(of_workload)}"
        yield Measured(work, "the best engine", "≤ 1.3×", max(of_workload), min(of_workload), max(of_workload), note)
        yield Measured(f"auto, {name}: longest time to choose", "limit", "≤ 3 s", slowest, slowest, slowest, taken)
    if len(names) > 1:
        share = 100 * sum(ratio <= GOOD_RATIO for ratio in everything) / len(everything)
        note = f"{good(everything)}, at worst {max(everything):.2f}×"
        work = f"auto, all workloads: choices within {GOOD_RATIO}× of the best engine"
        yield Measured(work, "all choices", "≥ 97.7 %", share, share, share, note)


def good(ratios: list[float]) -> str:
    """How many of the choices are good."""
    return f"within {GOOD_RATIO}× in {sum(ratio <= GOOD_RATIO for ratio in ratios)} of {len(ratios)}"


TRAINING = [name for name, entry in all_workloads().items() if entry.kind == "training"]
ROWS_OF_AUTO: dict[str, Row] = {"auto": partial(auto, TRAINING)}
"""Takes half an hour or more."""
PARTS_OF_AUTO: dict[str, Row] = {f"auto-{name}": partial(auto, [name]) for name in TRAINING}
"""The same by workload."""
