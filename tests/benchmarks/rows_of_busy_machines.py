"""Rows that measure training beside other programs against the same training on an idle machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fitting import CPU
from measured import Measured, Options, Row

from ensemblekit.bench.contestants import contest_of
from ensemblekit.bench.workloads import all_workloads
from ensemblekit.core.threads import threads

SPIN = "import os\nos.sched_setaffinity(0, {{{core}}})\nprint('ready', flush=True)\nwhile True: pass"
NUM_NEIGHBOURS = 3
ROUNDS = 3


def busy_mlp(options: Options) -> Iterator[Measured]:
    """Steps of MLPs by the stacked engine: idle, with a busy process on each core, and beside other trainings."""
    for members in (2,) if options.smoke else (4, 8, 16, 64, 256):
        here = all_workloads()["tiny-16"].changed(ensemble={"members": members})
        seconds = 0.05 if options.smoke else 1.0
        states = {
            "one busy process per core": [[sys.executable, "-c", SPIN.format(core=core)] for core in cores()],
            f"beside {NUM_NEIGHBOURS} trainings of the same kind": [neighbour(members)] * NUM_NEIGHBOURS,
        }
        make = contest_of(here, CPU).makers["stacked"]
        for (state, commands), asked in zip(states.items(), ("≥ 0.4×", "≥ 0.2×"), strict=True):
            with ExitStack() as stack:
                # An engine takes the number of threads from torch when it is made.
                train = make(stack)
                with threads(1):
                    with_one = make(stack)
                shares, against_one = [], []
                for _ in range(1 if options.smoke else ROUNDS):
                    idle = rate(train, seconds)
                    with running(commands):
                        busy = rate(train, 3 * seconds)
                        alone = rate(with_one, 3 * seconds)
                    shares.append(busy / idle)
                    against_one.append(busy / alone)
                work = f"MLP step, M={members}, {state}"
                note = f"{1e3 / (here.steps * idle):.3g} ms per step when idle"
                yield summary(work, "itself on the idle machine", asked, shares, note)
                yield summary(work, "itself with one thread", "≥ 1×", against_one, "the same state of the machine")


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def neighbour(members: int) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("neighbour.py")), str(members)]


def rate(train: Callable[[], object], seconds: float) -> float:
    """Rounds per second."""
    train()
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        train()
        count += 1
    return count / (time.perf_counter() - started)


@contextmanager
def running(commands: list[list[str]]) -> Iterator[None]:
    """Other processes that keep the machine busy."""
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def summary(work: str, against: str, asked: str, ratios: list[float], note: str) -> Measured:
    """The median of some ratios, with the least and the greatest."""
    ordered = sorted(ratios)
    return Measured(work, against, asked, ordered[len(ordered) // 2], ordered[0], ordered[-1], note)


ROWS_OF_BUSY_MACHINES: dict[str, Row] = {"busy-mlp": busy_mlp}
