"""Displays of a run in training: silent, plain lines for a pipe, a live bar for a terminal; `notebook.py` has another.

A display is a listener of the run's life cycle, by the same hooks as any extension.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as LiveBar

from ensemblekit.core.hookspecs import RunStatus, hookimpl
from ensemblekit.display.console import Printer
from ensemblekit.display.numbers import number, quality_text
from ensemblekit.display.summary import run_summary

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

REFRESH_SECONDS = 0.2
FIRST_STEPS = 3
"""Steps before the remaining time is estimated: the first ones are slower than the rest."""
PLAN_TITLE = "plan"


class Progress:
    """A silent display, and the base of the others. Call `close` when the run ends, however it ends."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and more than once."""


class PlainProgress(Progress):
    """For a pipe or a log file: the plan, one line per epoch, the summary."""

    def __init__(self) -> None:
        self.printer = Printer(optional=True)  # a run goes on without its display
        self.spec: Spec | None = None
        self.path = Path()
        self.repeat = ""
        """How to repeat the very run, if its engine was measured."""

    def show_plan(self, plan: Sequence[tuple[str, str]]) -> None:
        """Print the plan of the run."""
        self.printer.table((PLAN_TITLE, ""), plan)

    @hookimpl
    def run_started(self, spec: Spec, path: Path, plan: Sequence[tuple[str, str]]) -> None:
        self.spec, self.path = spec, path
        self.show_plan(plan)

    @hookimpl
    def engine_chosen(self, engine: str, seconds_per_step: Mapping[str, float]) -> None:
        self.printer.text(engine_line(engine, seconds_per_step))
        self.repeat = repeat_line(engine) if seconds_per_step else ""

    @hookimpl
    def epoch_finished(self, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        self.printer.text(epoch_line(metrics, num_epochs))

    @hookimpl
    def notice(self, text: str) -> None:
        self.printer.text(f"note: {text}")

    @hookimpl
    def run_ended(
        self,
        status: RunStatus,
        metrics: Mapping[str, Any],
        members: Sequence[Mapping[str, Any]],
        seconds: Mapping[str, float],
    ) -> None:
        self.close()
        if status != "finished" or self.spec is None:
            return
        summary = run_summary(self.path, self.spec, metrics, members, seconds)
        self.printer.text()
        self.printer.table(summary.columns, summary.rows)
        self.printer.text()
        place = f"the run is in {summary.path}"
        for line in (summary.gain, summary.decomposition, summary.out_of_fold, summary.time, place, self.repeat):
            if line:
                self.printer.text(line)
        self.printer.text()
        self.printer.text("next:")
        for command, purpose in summary.next_steps:
            self.printer.verbatim(f"  {command}  # {purpose}")


class EpochLines:
    """A line for each epoch and each notice, for training without a run directory."""

    def __init__(self) -> None:
        self.printer = Printer(optional=True)  # training goes on without its display

    @hookimpl
    def epoch_finished(self, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        self.printer.text(epoch_line(metrics, num_epochs))

    @hookimpl
    def notice(self, text: str) -> None:
        self.printer.text(f"note: {text}")


class RichProgress(PlainProgress):
    """For a terminal: a panel with the plan, a bar that fills up in each epoch, the summary."""

    def __init__(self) -> None:
        super().__init__()
        # refreshed after steps: a thread that draws would take time from the training
        self.bar = LiveBar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            console=self.printer.console,
            auto_refresh=False,
            transient=True,
        )
        self.task: TaskID | None = None
        self.clock = RunClock()
        self.last_refresh = 0.0
        self.last_metrics: Mapping[str, Any] = {}

    def show_plan(self, plan: Sequence[tuple[str, str]]) -> None:
        """Print the plan of the run in a panel."""
        self.printer.panel(PLAN_TITLE, plan)

    @hookimpl
    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        self.clock.epoch_started(epoch, num_epochs, num_steps)
        self.close()
        self.task = self.bar.add_task(f"epoch {epoch}/{num_epochs}", total=num_steps, state="")
        self.bar.start()
        self._refresh()

    @hookimpl
    def step_finished(self, num_samples: int) -> None:
        self.clock.step_finished(num_samples)
        if time.monotonic() - self.last_refresh >= REFRESH_SECONDS:
            self._refresh()

    @hookimpl
    def epoch_finished(self, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        self.close()
        self.last_metrics = metrics
        self.printer.text(epoch_line(metrics, num_epochs))

    def close(self) -> None:
        with suppress(OSError, ValueError):  # nobody reads the output any more
            self.bar.stop()
        if self.task is not None:
            self.bar.remove_task(self.task)
            self.task = None

    def _refresh(self) -> None:
        if self.task is None:
            return
        self.last_refresh = time.monotonic()
        state = "  ".join([*self.clock.texts(), *quality_cells(self.last_metrics)])
        self.bar.update(self.task, completed=self.clock.steps_of_epoch, state=state)
        self.bar.refresh()


class RunClock:
    """Counts steps and samples, and estimates throughput and remaining time from them."""

    def __init__(self) -> None:
        self.run_start = self.epoch_start = 0.0
        self.steps = self.steps_of_epoch = self.samples_of_epoch = self.remaining_steps = 0

    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        """Start counting an epoch."""
        self.epoch_start = time.monotonic()
        self.run_start = self.run_start or self.epoch_start
        self.steps_of_epoch = self.samples_of_epoch = 0
        self.remaining_steps = (num_epochs - epoch + 1) * num_steps

    def step_finished(self, num_samples: int) -> None:
        """Count a step."""
        self.steps += 1
        self.steps_of_epoch += 1
        self.samples_of_epoch += num_samples

    def texts(self) -> list[str]:
        """Return samples per second and, after a few steps, the remaining and the total time."""
        now = time.monotonic()
        if self.steps < FIRST_STEPS:
            return []
        elapsed = now - self.run_start
        remaining = elapsed / self.steps * (self.remaining_steps - self.steps_of_epoch)
        times = f"{_clock(remaining)} left of {_clock(elapsed + remaining)}"
        if not self.samples_of_epoch:
            return [times]
        return [*samples_per_second(self.samples_of_epoch / max(now - self.epoch_start, 1e-9)), times]


def choose_progress(quiet: bool) -> Progress:
    """Return the display that suits standard output; a silent one if `quiet`."""
    if quiet:
        return Progress()
    from ensemblekit.display.notebook import NotebookProgress, in_notebook  # which builds on this file

    if in_notebook():
        return NotebookProgress()
    return RichProgress() if Printer().for_a_person else PlainProgress()


def engine_line(name: str, measured: Mapping[str, float]) -> str:
    """Describe the engine: `engine stacked; measured per step: stacked 1.2 ms, threaded 3.4 ms`."""
    if not measured:
        return f"engine {name}"
    by_time = sorted(measured.items(), key=lambda item: item[1])
    times = ", ".join(f"{engine} {_duration(seconds)}" for engine, seconds in by_time)
    return f"engine {name}; measured per step: {times}"


def repeat_line(engine: str) -> str:
    """Say how to get the same bits again, where measuring may choose another engine the next time."""
    return f"the engine decides the last bits: --set engine.name={engine} repeats this very run"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def epoch_line(row: Mapping[str, Any], num_epochs: int) -> str:
    """Describe an epoch on one line; metrics that were not measured are left out."""
    cells = [f"epoch {row['epoch']:>{len(str(num_epochs))}}/{num_epochs}"]
    if row.get("train_loss") is not None:
        cells.append(f"train loss {number(row['train_loss'])}")
    cells += quality_cells(row)
    cells += samples_per_second(row.get("samples_per_second"))
    if row.get("seconds") is not None:
        cells.append(f"{row['seconds']:.1f} s")
    return "  ".join(cells)


def quality_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the quality of the ensemble at the end of an epoch, as cells of text."""
    shown = (
        ("test_loss", "loss"),
        ("test_accuracy", "accuracy"),
        ("test_mse", "mse"),
        ("test_r2", "R²"),
        ("test_diversity", "diversity"),
        ("validation_accuracy", "validation"),
    )
    return [
        f"{label} {quality_text(row[name], 'accuracy' if name.endswith('accuracy') else label)}"
        for name, label in shown
        if row.get(name) is not None
    ]


def samples_per_second(rate: float | None) -> list[str]:
    """Return the throughput as a cell of text; no cell if it is unknown."""
    return [] if rate is None else [f"{rate:,.0f} samples/s"]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
