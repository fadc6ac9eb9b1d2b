"""Progress of a benchmark on standard error: which workload is measured, and about how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as LiveBar

from ensemblekit.bench.workloads import Workload
from ensemblekit.core.streams import report

QUIET_SECONDS = 30.0
"""Lines for a pipe are at least so far apart, except for those about a new workload."""

Report = Callable[[str, float | None], None]
"""Takes what is done now, and the seconds that the rest of the workload takes if they are known."""


def unreported(text: str, seconds_left: float | None) -> None:
    """Report nothing."""


class Clock:
    """Estimates how long all workloads take: from how long those so far have taken, relative to what was expected.

    Args:
        expected: Seconds that each workload takes on a typical machine; only their ratios matter in the long run.
    """

    def __init__(self, expected: Sequence[float]) -> None:
        self.expected = expected
        self.taken: list[float] = []
        """Seconds of each workload that is finished."""
        self.started = time.monotonic()
        self.end: float | None = None
        """When the current workload will have finished; None: not known yet."""

    def tell(self, seconds_left: float | None) -> None:
        """Note how long the rest of the current workload takes."""
        if seconds_left is not None:
            self.end = time.monotonic() + seconds_left

    def next(self) -> None:
        """Start the next workload."""
        now = time.monotonic()
        self.taken.append(now - self.started)
        self.started, self.end = now, None

    def seconds_left(self) -> float:
        """Return the seconds that the current workload and all later ones will take."""
        now, number = time.monotonic(), len(self.taken)
        if number == len(self.expected):
            return 0.0
        taken, expected = sum(self.taken), sum(self.expected[:number])
        if self.end is not None:
            taken, expected = taken + max(self.end, now) - self.started, expected + self.expected[number]
        scale = taken / expected if expected else 1.0
        end = self.started + scale * self.expected[number] if self.end is None else self.end
        return max(end - now, 0.0) + scale * sum(self.expected[number + 1 :])


class PlainProgress:
    """For a pipe or a log file: a line when a workload starts, and now and then while it is measured.

    Args:
        workloads: All that are measured, in this order.
    """

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self.workloads = workloads
        self.began = self.last_line = time.monotonic()
        self.clock = Clock([workload.seconds for workload in workloads])

    def workload_started(self) -> None:
        """Show the next workload."""
        self.last_line = time.monotonic()
        report(f"{self.title}; {time_left(self.clock.seconds_left())}")

    def step(self, text: str, seconds_left: float | None) -> None:
        """Show what is done now; see `Report`."""
        self.clock.tell(seconds_left)
        if time.monotonic() - self.last_line >= QUIET_SECONDS:
            self.last_line = time.monotonic()
            report(f"{self.title}, {text}; {time_left(self.clock.seconds_left())}")

    def workload_finished(self) -> None:
        """Count the workload, before its results are printed."""
        self.clock.next()

    def close(self) -> None:
        """Say how long everything took, unless it was interrupted."""
        number = len(self.workloads)
        if len(self.clock.taken) == number:
            report(f"{number} workload{'s' * (number != 1)} in {duration(time.monotonic() - self.began)}")

    @property
    def title(self) -> str:
        """Number and name of the current workload."""
        number = len(self.clock.taken)
        return f"workload {number + 1} of {len(self.workloads)}: {self.workloads[number].name}"


class RichProgress(PlainProgress):
    """For a terminal: one line that is removed before results are printed."""

    def __init__(self, workloads: Sequence[Workload], console: Console) -> None:
        super().__init__(workloads)
        # drawn between measurements: a thread that draws would take time from them
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        self.bar = LiveBar(*columns, console=console, auto_refresh=False, transient=True)
        self.task = self.bar.add_task("", total=None, state="")

    def workload_started(self) -> None:
        self.bar.start()
        self._show("")

    def step(self, text: str, seconds_left: float | None) -> None:
        self.clock.tell(seconds_left)
        self._show(text)

    def workload_finished(self) -> None:
        super().workload_finished()
        self._stop()

    def close(self) -> None:
        self._stop()
        super().close()

    def _show(self, text: str) -> None:
        left = self.clock.seconds_left()
        elapsed = time.monotonic() - self.began
        state = ", ".join(filter(None, [text, time_left(left)]))
        self.bar.update(self.task, description=self.title, completed=elapsed, total=elapsed + left, state=state)
        with suppress(OSError, ValueError):  # nobody reads the terminal any more
            self.bar.refresh()

    def _stop(self) -> None:
        with suppress(OSError, ValueError):
            self.bar.stop()


def bench_progress(workloads: Sequence[Workload]) -> PlainProgress:
    """Return the progress that suits standard error."""
    console = Console(stderr=True)
    return RichProgress(workloads, console) if console.is_terminal else PlainProgress(workloads)


def time_left(seconds: float) -> str:
    """Describe the remaining time, no more exactly than it can be known: `about 7 minutes left`."""
    if seconds < 10:
        return "a few seconds left"
    tens = 10 * round(seconds / 10)
    if tens < 100:
        return f"about {tens} seconds left"
    return f"about {round(seconds / 60)} minutes left"


def duration(seconds: float) -> str:
    """Write seconds as `42 s` or `9 min 12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class RoundClock:
    """Reports each round of a workload, with the time that the rest takes: that of a mean round for each one left.

    Args:
        rounds: Number of rounds; another one before them warms up.
        report: Where to.
        after: Seconds of what follows the last round, if a round takes so many seconds.
    """

    def __init__(self, rounds: int, report: Report, after: Callable[[float], float] = lambda _: 0.0) -> None:
        self.rounds, self.report, self.after = rounds, report, after
        self.started, self.done = time.monotonic(), 0
        report(f"round 1 of {rounds}", None)

    def round_finished(self) -> None:
        """Count a round."""
        self.done += 1
        of_round = (time.monotonic() - self.started) / (self.done + 1)
        seconds_left = (self.rounds - self.done) * of_round + self.after(of_round)
        self.report(f"round {min(self.done + 1, self.rounds)} of {self.rounds}", seconds_left)
