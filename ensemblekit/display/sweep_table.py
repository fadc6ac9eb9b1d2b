"""Displays of a sweep: plain lines for a pipe, or one live table for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_rows import SweepRun
from ensemblekit.display.console import Printer
from ensemblekit.display.summary import number, quality_text

REFRESH_SECONDS = 0.2
RECENT_RUNS = 8
"""Ended runs that the live table shows, below those that are in work."""
COLUMNS = ("run", "status", "validation loss", "test", "seconds")


@dataclass
class SweepState:
    """What is known about a sweep while it runs."""

    runs: dict[str, SweepRun] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    in_work: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    """The current epoch and the last metrics of each run that is trained now."""
    started: float = field(default_factory=time.monotonic)
    epochs_done: int = 0

    @property
    def num_ended(self) -> int:
        """The number of runs that will not change any more."""
        return sum(run.status in ("finished", "failed", "damaged", "pruned") for run in self.runs.values())

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the epochs trained so far; None before the first."""
        if not self.epochs_done:
            return None
        waiting = [run for run in self.runs.values() if run.status in ("planned", "interrupted", "running")]
        left = sum(max(self.epochs.get(run.name, 0) - self._epochs_of(run), 0) for run in waiting)
        return (time.monotonic() - self.started) / self.epochs_done * left

    def _epochs_of(self, run: SweepRun) -> int:
        return self.in_work[run.name][0] - 1 if run.name in self.in_work else run.epochs

    def summary(self) -> str:
        """Return a line: runs that have ended, the best so far, and the time left."""
        failed = sum(run.status in ("failed", "damaged") for run in self.runs.values())
        parts = [f"{self.num_ended} of {len(self.runs)} runs ended" + (f" ({failed} failed)" if failed else "")]
        if (best := best_of(self.runs.values())) is not None:
            parts.append(f"best so far {best.name}, validation loss {number(best.metrics['validation_loss'])}")
        if self.seconds_left is not None and self.num_ended < len(self.runs):
            parts.append(f"about {timedelta(seconds=round(self.seconds_left))} left")
        return "; ".join(parts)


class PlainSweep(SweepListener):
    """For a pipe or a log file: a line for each run that starts or ends."""

    def __init__(self) -> None:
        self.printer = Printer()
        self.state = SweepState()

    def sweep_started(self, path: Path, runs: Sequence[SweepRun], epochs: Mapping[str, int]) -> None:
        self.state.runs |= {run.name: run for run in runs}
        self.state.epochs = epochs
        self.show_start(path)

    def say(self, text: str) -> None:
        """Print a line; a reader that is gone, or a full disk, does not stop the sweep."""
        with suppress(OSError, ValueError):
            self.printer.text(text)

    def show_start(self, path: Path) -> None:
        """Print where the sweep is, and what is done already."""
        self.say(f"sweep {path}: {len(self.state.runs)} runs, {self.state.num_ended} of them ended before")

    def notice(self, text: str) -> None:
        self.say(f"note: {text}")

    def run_started(self, name: str) -> None:
        self.state.in_work[name] = (1, {})
        self.say(f"{name}: started")

    def epoch_started(self, name: str, epoch: int, num_epochs: int) -> None:
        self.state.in_work[name] = (epoch, self.state.in_work.get(name, (0, {}))[1])

    def epoch_finished(self, name: str, epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        self.state.in_work[name] = (epoch, metrics)
        self.state.epochs_done += 1

    def run_ended(self, run: SweepRun) -> None:
        self.state.in_work.pop(run.name, None)
        self.state.runs[run.name] = run
        self.show_end(run)

    def show_end(self, run: SweepRun) -> None:
        """Print how a run ended, and the state of the sweep."""
        labels = ("validation loss", "test", "seconds")
        results = [f"{label} {text}" for label, text in zip(labels, result_cells(run), strict=True) if text]
        cells = [f"{run.status}: {run.error}" if run.error else run.status, *results]
        self.say(f"{run.name}: {', '.join(cells)}")
        self.say(f"  {self.state.summary()}")


class LiveSweep(PlainSweep):
    """For a terminal: one table of the runs in work and those that ended last."""

    def __init__(self) -> None:
        super().__init__()
        # refreshed after epochs: a thread that draws would take time from the training
        self.live = Live(console=self.printer.console, auto_refresh=False, transient=True)
        self.last_refresh = 0.0
        self.recent: list[SweepRun] = []

    def show_start(self, path: Path) -> None:
        super().show_start(path)
        self.live.start()
        self._refresh(now=True)

    def run_started(self, name: str) -> None:
        self.state.in_work[name] = (1, {})
        self._refresh(now=True)

    def epoch_started(self, name: str, epoch: int, num_epochs: int) -> None:
        super().epoch_started(name, epoch, num_epochs)
        self._refresh()

    def epoch_finished(self, name: str, epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        super().epoch_finished(name, epoch, num_epochs, metrics)
        self._refresh()

    def show_end(self, run: SweepRun) -> None:
        self.recent = [*self.recent, run][-RECENT_RUNS:]
        self._refresh(now=True)

    def close(self) -> None:
        self.live.stop()

    def _refresh(self, now: bool = False) -> None:
        if now or time.monotonic() - self.last_refresh >= REFRESH_SECONDS:
            self.last_refresh = time.monotonic()
            with suppress(OSError, ValueError):
                self.live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(COLUMNS):
            table.add_column(column, style="cyan" if index == 0 else "", overflow="fold")
        for name, (epoch, metrics) in self.state.in_work.items():
            run = SweepRun(
                name, Path(), {}, "", 0, f"epoch {epoch}/{self.state.epochs.get(name, '?')}", metrics=metrics
            )
            table.add_row(*(Text(text) for text in (name, run.status, *result_cells(run)[:2], "")))
        for run in self.recent[::-1]:
            status = f"{run.status}: {run.error}" if run.error else run.status
            table.add_row(*(Text(text) for text in (run.name, status, *result_cells(run))))
        return Group(table, Text(self.state.summary()))


def choose_sweep_display(quiet: bool) -> SweepListener:
    """Return the display that suits standard output; a silent one if `quiet`."""
    if quiet:
        return SweepListener()
    return LiveSweep() if Printer().for_a_person else PlainSweep()


def best_of(runs: Iterable[SweepRun]) -> SweepRun | None:
    """Return the finished run with the lowest validation loss; None without validation data."""
    finished = [run for run in runs if run.status == "finished" and run.metrics.get("validation_loss") is not None]
    return min(finished, key=lambda run: run.metrics["validation_loss"], default=None)


def result_cells(run: SweepRun) -> tuple[str, str, str]:
    """Return validation loss, test accuracy or error, and seconds as text; empty where they are unknown."""
    accuracy, mse = run.metrics.get("test_accuracy"), run.metrics.get("test_mse")
    test = quality_text(accuracy, "accuracy") if accuracy is not None else number(mse)
    seconds = "" if run.seconds is None else f"{run.seconds:.1f}"
    return number(run.metrics.get("validation_loss")), test, seconds


def result_rows(runs: Sequence[SweepRun]) -> list[tuple[str, ...]]:
    """Return a row for each run, for the closing table; see `COLUMNS`."""
    return [
        (run.name, f"{run.status}: {run.error}" if run.error else status_text(run), *result_cells(run)) for run in runs
    ]


def status_text(run: SweepRun) -> str:
    """Return the status in words, with the epoch at which a run was interrupted."""
    return f"interrupted at epoch {run.epochs}" if run.status == "interrupted" else run.status
