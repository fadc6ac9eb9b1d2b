"""The display of a run in a notebook: one output that is updated in place, in HTML and as plain text."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ensemblekit.core.hookspecs import RunStatus, hookimpl
from ensemblekit.core.html_tables import html_table, html_text
from ensemblekit.display.progress import Progress, RunClock, engine_line, epoch_line, quality_cells
from ensemblekit.display.summary import run_summary

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

REFRESH_SECONDS = 0.5
"""Each refresh is a message to the browser."""
SHOWN_EPOCHS = 8


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; imports nothing."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


class NotebookProgress(Progress):
    """For a notebook: the plan, a bar, the last epochs and, at the end, the summary."""

    def __init__(self) -> None:
        self.identifier = f"ensemblekit-{uuid4().hex}"
        self.spec: Spec | None = None
        self.path = Path()
        self.plan: Sequence[tuple[str, str]] = ()
        self.lines: list[str] = []
        """A line for each epoch, and notices."""
        self.state = "starting"
        self.summary: list[str] = []
        """Parts of the page below the epochs."""
        self.text: list[str] = []
        """The same as lines of plain text."""
        self.clock = RunClock()
        self.epoch = self.num_epochs = 0
        self.num_steps = 1
        self.last_metrics: Mapping[str, Any] = {}
        self.last_refresh = 0.0
        self.is_shown = False

    @hookimpl
    def run_started(self, spec: Spec, path: Path, plan: Sequence[tuple[str, str]]) -> None:
        self.spec, self.path, self.plan = spec, path, list(plan)
        self._show()

    @hookimpl
    def engine_chosen(self, engine: str, seconds_per_step: Mapping[str, float]) -> None:
        self.lines.append(engine_line(engine, seconds_per_step))
        self._show()

    @hookimpl
    def epoch_started(self, epoch: int, num_epochs: int, num_steps: int) -> None:
        self.clock.epoch_started(epoch, num_epochs, num_steps)
        self.epoch, self.num_epochs, self.num_steps = epoch, num_epochs, num_steps
        self._show_step()

    @hookimpl
    def step_finished(self, num_samples: int) -> None:
        self.clock.step_finished(num_samples)
        if time.monotonic() - self.last_refresh >= REFRESH_SECONDS:
            self._show_step()

    @hookimpl
    def epoch_finished(self, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        self.last_metrics = metrics
        self.lines.append(epoch_line(metrics, num_epochs))
        if time.monotonic() - self.last_refresh >= REFRESH_SECONDS:
            self._show()

    @hookimpl
    def notice(self, text: str) -> None:
        self.lines.append(f"note: {text}")
        self._show()

    @hookimpl
    def run_ended(
        self,
        status: RunStatus,
        metrics: Mapping[str, Any],
        members: Sequence[Mapping[str, Any]],
        seconds: Mapping[str, float],
    ) -> None:
        self.state = status
        if status == "finished" and self.spec is not None:
            summary = run_summary(self.path, self.spec, metrics, members, seconds)
            members_table = html_table(summary.rows[:-1], summary.columns)
            texts = (summary.gain, summary.decomposition, summary.out_of_fold, summary.time)
            lines = [line for line in texts if line]
            self.summary = [
                html_table(summary.rows[-1:], summary.columns),
                f"<details><summary>members</summary>{members_table}</details>",
                *(f"<div>{html_text(line)}</div>" for line in lines),
                f"<div>the run is in <code>{html_text(summary.path)}</code></div>",
            ]
            self.text = [*lines, f"the run is in {summary.path}"]
        self._show()

    def _show_step(self) -> None:
        """Show how far the training is."""
        self.last_refresh = time.monotonic()
        cells = [f"epoch {self.epoch}/{self.num_epochs}", *self.clock.texts(), *quality_cells(self.last_metrics)]
        self.state = "  ".join(cells)
        self._show()

    def _show(self) -> None:
        """Show the display, or update it where it is shown already."""
        from IPython.display import display, update_display

        page = {"text/html": self._html(), "text/plain": "\n".join([*self.lines, self.state, *self.text])}
        if self.is_shown:
            update_display(page, raw=True, display_id=self.identifier)
        else:
            display(page, raw=True, display_id=self.identifier)
            self.is_shown = True

    def _html(self) -> str:
        plan = f"<details><summary>plan</summary>{html_table(self.plan)}</details>"
        hidden, shown = self.lines[:-SHOWN_EPOCHS], self.lines[-SHOWN_EPOCHS:]
        earlier = f"<details><summary>{len(hidden)} earlier lines</summary>{_preformatted(hidden)}</details>"
        parts = [plan, earlier if hidden else "", _preformatted(shown), self._bar(), *self.summary]
        return f'<div class="ensemblekit">{"".join(parts)}</div>'

    def _bar(self) -> str:
        total = self.num_epochs * self.num_steps
        done = (self.epoch - 1) * self.num_steps + self.clock.steps_of_epoch if self.epoch else 0
        done = total if self.state == "finished" else done
        bar = f'<progress value="{done}" max="{max(total, 1)}" aria-label="training"></progress>'
        return f"<div>{bar} {html_text(self.state)}</div>"


def _preformatted(lines: Sequence[str]) -> str:
    text = "\n".join(map(html_text, lines))
    return f'<pre style="white-space: pre; overflow-x: auto; margin: 0.3em 0">{text}</pre>' if lines else ""
