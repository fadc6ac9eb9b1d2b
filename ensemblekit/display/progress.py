"""What a person sees of a run in training: nothing, plain lines on a pipe, or a live bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.panel import Panel
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as LiveBar
from rich.table import Table
from rich.text import Text

from ensemblekit.display.console import Printer
from ensemblekit.display.summary import FinishedRun, number, quality_text, run_summary

REFRESH_SECONDS = 0.2
FIRST_STEPS = 3
"""Steps before time is estimated: the first ones are slower than the rest."""


class Progress:
    """Told by the trainer what happens; this one shows nothing. Call `close` when training ends, however it ends."""

    def planned(self, plan: Sequence[tuple[str, str]]) -> None:
        """What will run, as rows of a label and words."""

    def engine_chosen(self, name: str, measured: Mapping[str, float]) -> None:
        """Which engine runs, and the seconds per step of each that was tried (none if the spec named it)."""

    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        """An epoch begins, counted from 1."""

    def step(self, epoch: int, step: int, num_samples: int) -> None:
        """A step of `num_samples` is done; reads nothing from the device."""

    def epoch_finished(self, row: Mapping[str, Any]) -> None:
        """An epoch is done and evaluated; `row` is its line of metrics.jsonl."""

    def saved(self, epoch: int) -> None:
        """A checkpoint of the epoch is on disk."""

    def finished(self, run: FinishedRun) -> None:
        """Training has ended."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and more than once."""


class PlainProgress(Progress):
    """For a pipe or a log file: the plan, one line per epoch, the summary."""

    def __init__(self) -> None:
        self.printer = Printer()
        self.num_epochs = 0

    def planned(self, plan: Sequence[tuple[str, str]]) -> None:
        self.printer.table(("what will run", ""), plan)

    def engine_chosen(self, name: str, measured: Mapping[str, float]) -> None:
        self.printer.text(engine_line(name, measured))

    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        self.num_epochs = num_epochs

    def epoch_finished(self, row: Mapping[str, Any]) -> None:
        self.printer.text(epoch_line(row, self.num_epochs))

    def finished(self, run: FinishedRun) -> None:
        summary = run_summary(run)
        self.printer.text()
        self.printer.table(summary.columns, summary.rows)
        self.printer.text()
        for line in (summary.gain, summary.decomposition, summary.time, f"the run is in {summary.path}"):
            if line:
                self.printer.text(line)
        self.printer.text()
        self.printer.text("next:")
        for command, purpose in summary.next_steps:
            self.printer.verbatim(f"  {command}  # {purpose}")


class RichProgress(PlainProgress):
    """For a terminal: a panel with the plan, a bar that fills up in each epoch, the summary."""

    def __init__(self) -> None:
        super().__init__()
        # refreshed by the steps themselves: a thread that draws would take the training's time
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
        self.last_row: Mapping[str, Any] = {}

    def planned(self, plan: Sequence[tuple[str, str]]) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, words in plan:
            grid.add_row(Text(label), Text(words))
        self.printer.console.print(Panel(grid, title="what will run", title_align="left", expand=False))

    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        super().epoch_started(epoch, num_epochs, num_steps)
        self.clock.epoch_started(epoch, num_epochs, num_steps)
        self.close()
        self.task = self.bar.add_task(f"epoch {epoch}/{num_epochs}", total=num_steps, state="")
        self.bar.start()
        self._refresh()

    def step(self, epoch: int, step: int, num_samples: int) -> None:
        self.clock.stepped(num_samples)
        if time.monotonic() - self.last_refresh >= REFRESH_SECONDS:
            self._refresh()

    def epoch_finished(self, row: Mapping[str, Any]) -> None:
        self.close()
        self.last_row = row
        super().epoch_finished(row)

    def finished(self, run: FinishedRun) -> None:
        self.close()
        super().finished(run)

    def close(self) -> None:
        self.bar.stop()
        if self.task is not None:
            self.bar.remove_task(self.task)
            self.task = None

    def _refresh(self) -> None:
        if self.task is None:
            return
        self.last_refresh = time.monotonic()
        state = "  ".join([*self.clock.words(), *quality_cells(self.last_row)])
        self.bar.update(self.task, completed=self.clock.steps_of_epoch, state=state)
        self.bar.refresh()


class RunClock:
    """Counts steps and samples, and from them tells throughput and the time that is left."""

    def __init__(self) -> None:
        self.run_started = self.epoch_began = 0.0
        self.steps = self.steps_of_epoch = self.samples_of_epoch = self.steps_ahead = 0

    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        self.epoch_began = time.monotonic()
        self.run_started = self.run_started or self.epoch_began
        self.steps_of_epoch = self.samples_of_epoch = 0
        self.steps_ahead = (num_epochs - epoch + 1) * num_steps

    def stepped(self, num_samples: int) -> None:
        self.steps += 1
        self.steps_of_epoch += 1
        self.samples_of_epoch += num_samples

    def words(self) -> list[str]:
        """Samples per second, and once a few steps are done the time left and in all."""
        now = time.monotonic()
        if self.steps < FIRST_STEPS:
            return []
        elapsed = now - self.run_started
        left = elapsed / self.steps * (self.steps_ahead - self.steps_of_epoch)
        times = f"{_clock(left)} left of {_clock(elapsed + left)}"
        if not self.samples_of_epoch:
            return [times]
        return [*samples_per_second(self.samples_of_epoch / max(now - self.epoch_began, 1e-9)), times]


def choose_progress(quiet: bool) -> Progress:
    """Silent if asked for, else what suits standard output: a live display on a terminal, plain lines elsewhere."""
    if quiet:
        return Progress()
    return RichProgress() if Printer().for_a_person else PlainProgress()


def engine_line(name: str, measured: Mapping[str, float]) -> str:
    """`engine stacked; measured per step: stacked 1.2 ms, threaded 3.4 ms`."""
    if not measured:
        return f"engine {name}"
    tried = sorted(measured.items(), key=lambda item: item[1])
    times = ", ".join(f"{engine} {1000 * seconds:.3g} ms" for engine, seconds in tried)
    return f"engine {name}; measured per step: {times}"


def epoch_line(row: Mapping[str, Any], num_epochs: int) -> str:
    """One epoch in one line; what was not measured in it is left out."""
    cells = [f"epoch {row['epoch']:>{len(str(num_epochs))}}/{num_epochs}"]
    if row.get("train_loss") is not None:
        cells.append(f"train loss {number(row['train_loss'])}")
    cells += quality_cells(row)
    cells += samples_per_second(row.get("images_per_second"))
    if row.get("seconds") is not None:
        cells.append(f"{row['seconds']:.1f} s")
    return "  ".join(cells)


def quality_cells(row: Mapping[str, Any]) -> list[str]:
    """How good the ensemble was at the end of an epoch."""
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
    """The throughput as a cell, or no cell."""
    return [] if rate is None else [f"{rate:,.0f} samples/s"]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
