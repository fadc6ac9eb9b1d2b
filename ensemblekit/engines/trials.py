"""Trials of engines with larger and larger parts of a training step, until one is clearly ahead or time is up.

They start with a few members and samples and go on for the engines that can still win: so they cost little for large
networks, and for small ones whole steps decide.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ensemblekit.core.threads import num_cores
from ensemblekit.engines.timed_steps import EnginesOnTrial, Size, Stage, Work

TIME_LIMIT_SECONDS = 2.4
"""Time for all trials, as far as it can be predicted; with the last step it stays below three seconds."""
FIRST_STEP = 3.0
"""How many times as long as the others the first step of a size takes, about: it maps memory and prepares kernels."""
SHORTEST_LIMIT_SECONDS = 0.1
SHARE_OF_RUN = 0.05
"""Trials for a short run may take this share of its time, and at least the shortest limit."""
FEWEST_ROUNDS, FEWEST_ROUNDS_AGAINST_EXPECTATION = 2, 5
"""An engine is not given up after fewer rounds, since one of them may be disturbed: it takes more of them to give up
what is expected to be the fastest, or to believe that something else is."""
COMPUTE_BOUND_SECONDS = 0.05
"""From the smallest parts alone, engines are given up only if steps take at least so long: in shorter ones the overhead
of operations dominates, and larger parts may turn out differently."""
RELIABLE_AFTER_ROUNDS = (float("inf"), 2.0, 1.4)
"""The reliable ratio after so few rounds, from none on, whatever the size."""


@dataclass(frozen=True)
class Level:
    """Trials with parts of one size."""

    size: Size
    max_rounds: int
    reliable_ratio: float
    """Engines whose times differ by less count as equally fast."""


def levels_of(work: Work) -> list[Level]:
    """Return the sizes to try, up to that of the whole step."""
    # A method may have a parameter for each member, and frozen members differ from the others: only members that are
    # trained one by one anyway can represent all of them.
    alike = work.objective.separable and not any(member.frozen or member.size > 1 for member in work.members)
    few_members = min(work.size.members, 2 * num_cores()) if alike else work.size.members
    # few samples show only large differences, and what is extrapolated from two sizes is not exact
    smaller = [Level(Size(few_members, 8), 2, 2.5), Level(Size(few_members, 32), 5, 1.3)]
    return [*(level for level in smaller if level.size.samples < work.size.samples), Level(work.size, 15, 1.05)]


class Trials:
    """Trials of several engines.

    Args:
        names: the engines, at least one; from the one that is expected to be the fastest.
        engines: makes them.
        work: the step.
    """

    def __init__(self, names: Iterable[str], engines: EnginesOnTrial, work: Work) -> None:
        self.started = time.perf_counter()
        self.work = work
        self.contenders = list(names)
        """The engines that can still win."""
        first, *larger = levels_of(work)
        self.level, self.stage = first, Stage(engines, work.part(first.size))
        self._compare()
        while larger and len(self.contenders) > 1:
            affordable = [level for level in larger if self._is_affordable(level)]
            if affordable:
                self.level = affordable[-1]  # whole steps at once, where they are short
                self.stage = Stage(engines, work.part(self.level.size), before=self.stage)
                larger = larger[larger.index(self.level) + 1 :]
                self._compare()
            elif len(self.contenders) > 2:
                expected, *others = self.contenders
                self.contenders = [expected, min(others, key=self._estimate)]
            else:
                break

    @property
    def seconds_per_step(self) -> dict[str, float]:
        """The seconds of a whole step of each engine that took part in the last trials; the fastest is among them."""
        return {name: self._estimate(name) for name in self.stage.first}

    @property
    def reliable_ratio(self) -> float:
        """Engines whose times differ by less than this ratio count as equally fast."""
        if len(self.contenders) <= 1:
            return 1.0
        expected, leader = self.contenders[0], self._leader
        num_rounds = self.stage.num_rounds(leader)
        if num_rounds < len(RELIABLE_AFTER_ROUNDS):
            return max(self.level.reliable_ratio, RELIABLE_AFTER_ROUNDS[num_rounds])
        noise = max(self.stage.noise(name, self.work.size) for name in (expected, leader))
        return max(self.level.reliable_ratio, noise)

    @property
    def _leader(self) -> str:
        return min(self.contenders, key=self._estimate)

    def _estimate(self, name: str) -> float:
        """Return the seconds of a whole step of an engine."""
        return self.stage.estimate(name, self.work.size)

    @property
    def _deadline(self) -> float:
        limit = TIME_LIMIT_SECONDS
        if self.work.num_steps is not None and self.stage.first:
            seconds = self.work.num_steps * self._estimate(self._leader)
            limit = min(max(SHARE_OF_RUN * seconds, SHORTEST_LIMIT_SECONDS), limit)
        return self.started + limit

    def _is_affordable(self, level: Level) -> bool:
        """Whether there is time for the first step of each engine and the fewest rounds."""
        seconds = sum(self.stage.estimate(name, level.size) for name in self.contenders)
        return time.perf_counter() + (FIRST_STEP + FEWEST_ROUNDS) * seconds <= self._deadline

    def _compare(self) -> None:
        """Time steps of the current size until one engine is clearly ahead."""
        stage = self.stage
        stage.begin(self.contenders, self._deadline)
        self.contenders = [name for name in self.contenders if name in stage.first]
        for _ in range(self.level.max_rounds):
            expected = sum(stage.seconds(name) for name in self.contenders)
            if len(self.contenders) <= 1 or time.perf_counter() + expected > self._deadline:
                return
            stage.add_round(self.contenders)
            self.contenders = [name for name in self.contenders if not self._is_behind(name)]

    def _is_behind(self, name: str) -> bool:
        """Whether an engine is clearly slower than the fastest: in most rounds, and the fewer they are the clearer."""
        is_smallest = self.stage.before is None and self.level.size != self.work.size
        if is_smallest and self.stage.seconds(self._leader) < COMPUTE_BOUND_SECONDS:
            return False
        ratios = sorted(self.stage.ratios(name, self._leader, self.work.size))
        as_expected = self._leader == self.contenders[0]
        if len(ratios) < (FEWEST_ROUNDS if as_expected else FEWEST_ROUNDS_AGAINST_EXPECTATION):
            return False
        return ratios[len(ratios) // 4] >= max(self.level.reliable_ratio, 1 + 0.5 / len(ratios))
