"""What the time of a run is spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ACTIVITIES = ("start", "training", "evaluation", "checkpoints")


@dataclass
class Elapsed:
    """The duration of a block so far, or in all once it has ended, without the activities inside it."""

    start: float
    inner: float = 0.0
    """Seconds of the activities inside the block."""
    total: float | None = None
    """Seconds of the whole block, once it has ended."""

    @property
    def seconds(self) -> float:
        """The duration."""
        total = time.perf_counter() - self.start if self.total is None else self.total
        return total - self.inner


class Stopwatch:
    """Seconds by activity; an activity inside another one is not counted twice."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._open: list[Elapsed] = []

    @contextmanager
    def measure(self, activity: str) -> Iterator[Elapsed]:
        """Add the time of a block to the seconds of an activity."""
        elapsed = Elapsed(time.perf_counter())
        self._open.append(elapsed)
        try:
            yield elapsed
        finally:
            elapsed.total = time.perf_counter() - elapsed.start
            self._open.pop()
            self.seconds[activity] += elapsed.seconds
            if self._open:
                self._open[-1].inner += elapsed.total
