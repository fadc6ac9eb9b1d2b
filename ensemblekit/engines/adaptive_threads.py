"""One thread instead of all for a training step, while that is clearly faster by the time that steps take.

The threads of an operation wait for each other at its end. Where another program has one of the cores, they wait for
the thread that does not run, and all of them together can be slower than a single one. It must not matter for the
results which of the two is taken: see `ExplicitChain.is_same_with_one_thread`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from ensemblekit.core.threads import one_thread

STEPS_OF_TRIAL = 8
"""Steps of a trial with one thread, then as many with all threads; their medians are compared. Not in turn: after a
change, it takes threads some steps to settle beside those of other programs."""
CLEARLY_FASTER = 1.25
"""One thread is used if all threads take longer by this ratio: it leaves cores unused when they become free."""
FIRST_TRIAL_SECONDS = 1.0
"""Until then all threads are used: the first steps take longer for other reasons."""
SHARE_OF_TRIALS = 0.01
"""Trials may take this share of the time longer than steps with the better number of threads."""
LONGEST_INTERVAL_SECONDS = 20.0
SLOWER = 1.5
SLOW_STEPS = 4
"""After so many steps in a row with all threads that take longer by the ratio above, the next trial is due."""


class AdaptiveThreads:
    """Decides before each step, from the seconds of earlier ones."""

    def __init__(self) -> None:
        self.uses_one = False
        self.trial: dict[bool, list[float]] | None = None
        """The seconds of steps with one thread (True) and with all (False), while there is a trial."""
        self.next_trial = time.perf_counter() + FIRST_TRIAL_SECONDS
        self.usual_seconds = math.inf
        """Of a step, in the last trial."""
        self.slow_steps = 0

    @contextmanager
    def step(self, may_use_one: Callable[[], bool]) -> Iterator[None]:
        """Compute a step in this context.

        Args:
            may_use_one: returns whether the results would be the same with one thread; asked only before it is used.
        """
        if self.trial is None and (time.perf_counter() >= self.next_trial or self.slow_steps >= SLOW_STEPS):
            self.trial = {True: [], False: []}
        wants_one = self.uses_one if self.trial is None else len(self.trial[True]) < STEPS_OF_TRIAL
        uses_one = wants_one and may_use_one()
        start = time.perf_counter()
        with one_thread() if uses_one else nullcontext():
            yield
        if uses_one == wants_one:
            self._add(uses_one, time.perf_counter() - start)

    def _add(self, uses_one: bool, seconds: float) -> None:
        if self.trial is None:
            is_slow = not uses_one and seconds > SLOWER * self.usual_seconds
            self.slow_steps = self.slow_steps + 1 if is_slow else 0
            return
        self.trial[uses_one].append(seconds)
        if len(self.trial[False]) < STEPS_OF_TRIAL:
            return
        with_one, with_all = statistics.median(self.trial[True]), statistics.median(self.trial[False])
        self.uses_one = CLEARLY_FASTER * with_one < with_all
        self.usual_seconds = with_one if self.uses_one else with_all
        lost = STEPS_OF_TRIAL * abs(with_one - with_all)
        self.next_trial = time.perf_counter() + min(lost / SHARE_OF_TRIALS, LONGEST_INTERVAL_SECONDS)
        self.trial, self.slow_steps = None, 0
