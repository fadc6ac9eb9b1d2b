"""One thread or all of them for an operation that is repeated, whichever is faster at the moment, by the time it takes.

The threads of an operation wait for each other at its end. Where another program has one of the cores, they wait for
the thread that does not run, and all of them together can be slower than a single one. It must not matter for the
results which of the two is taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from ensemblekit.core.threads import one_thread

STEPS = 8
"""The medians of so many steps are compared: the last ones, and those of a trial with the other number of threads."""
SETTLING_STEPS = 12
"""Steps at the beginning of a trial that do not count: after a change, threads take about ten steps to settle beside
those of other programs, which were five times slower than later ones."""
STEPS_OF_TRIAL = SETTLING_STEPS + STEPS
FIRST_TRIAL_SECONDS = 1.0
"""Until then all threads are used: the first steps take longer for other reasons."""
SHARE_OF_TRIALS = 0.01
"""Trials may take this share of the time longer than steps with the better number of threads."""
LONGEST_INTERVAL_SECONDS = 60.0
CLEARLY_FASTER = 1.25
"""One thread is taken only if it is faster by this ratio: whether others use the cores changes within seconds."""
SLOWER = 1.5
"""If so many steps with all threads as a trial has took longer than usual by this ratio, the next trial is due. Not
sooner: where another program has just started, threads take some steps to settle, too."""


class AdaptiveThreads:
    """Decides before each step, from the seconds of earlier ones.

    Several threads may use it at once; their steps then disturb each other's seconds, but nothing else.
    """

    def __init__(self) -> None:
        self.uses_one = False
        self.recent: deque[float] = deque(maxlen=STEPS)
        """The seconds of the last steps with this number of threads."""
        self.trial: list[float] | None = None
        """The seconds of steps with the other number of threads, while there is a trial."""
        self.next_trial = time.perf_counter() + FIRST_TRIAL_SECONDS
        self.usual_seconds = math.inf
        """Of a step, when the last trial ended."""
        self.slow_steps = 0

    @contextmanager
    def step(self, may_use_one: Callable[[], bool]) -> Iterator[None]:
        """Compute a step in this context.

        Args:
            may_use_one: returns whether the results would be the same with one thread; asked only before it is used.
        """
        is_due = time.perf_counter() >= self.next_trial or self.slow_steps >= STEPS_OF_TRIAL
        if self.trial is None and is_due and len(self.recent) == STEPS:
            self.trial = []
        trial = self.trial
        wants_one = self.uses_one == (trial is None)
        uses_one = wants_one and may_use_one()
        start = time.perf_counter()
        with one_thread() if uses_one else nullcontext():
            yield
        if uses_one == wants_one:
            self._add(trial, time.perf_counter() - start)
        elif trial is not None:
            self._end_trial(LONGEST_INTERVAL_SECONDS)

    def _add(self, trial: list[float] | None, seconds: float) -> None:
        if trial is None:
            self.recent.append(seconds)
            is_slow = not self.uses_one and seconds > SLOWER * self.usual_seconds
            self.slow_steps = self.slow_steps + 1 if is_slow else 0
            return
        trial.append(seconds)
        if len(trial) == STEPS_OF_TRIAL:
            self._compare(trial[SETTLING_STEPS:])

    def _compare(self, others: list[float]) -> None:
        """Take the faster number of threads, after a trial of the other one."""
        current, other = statistics.median(self.recent), statistics.median(others)
        with_one, with_all = (current, other) if self.uses_one else (other, current)
        takes_one = CLEARLY_FASTER * with_one < with_all
        if takes_one != self.uses_one:
            self.recent.extend(others)
        self.uses_one, self.usual_seconds = takes_one, with_one if takes_one else with_all
        lost = STEPS_OF_TRIAL * abs(with_one - with_all)
        self._end_trial(min(lost / SHARE_OF_TRIALS, LONGEST_INTERVAL_SECONDS))

    def _end_trial(self, pause: float) -> None:
        self.trial, self.slow_steps = None, 0
        self.next_trial = time.perf_counter() + pause
