"""What a person sees of training: silence, plain lines, or a live bar."""

from __future__ import annotations

import io

import pytest
from helpers.fake_runs import REGRESSION_METRICS, FakeRun, members
from rich.console import Console

from ensemblekit.core.hooks import RunHooks
from ensemblekit.display import progress as progress_module
from ensemblekit.display.progress import (
    PlainProgress,
    Progress,
    RichProgress,
    RunClock,
    choose_progress,
    engine_line,
    epoch_line,
)

PLAN = [("data", "digits"), ("model", "mlp, 9,226 parameters, 73,808 in all"), ("method", "gncl [lambda]")]
ROW = {
    "epoch": 1,
    "train_objective": 0.4,
    "train_loss": 0.5,
    "train_accuracy": 0.9,
    "test_loss": 0.25,
    "test_accuracy": 0.951,
    "test_diversity": 0.031,
    "validation_accuracy": 0.94,
    "learning_rate": 0.01,
    "samples_per_second": 12345.6,
    "seconds": 1.25,
}


def tell(progress: Progress, epochs: int = 2, run: FakeRun | None = None) -> None:
    """Everything that a trainer says in a run."""
    run = run or FakeRun()
    hooks = RunHooks([], [progress]).call
    hooks.run_started(spec=run.spec, path=run.path, plan=PLAN)
    hooks.engine_chosen(engine="stacked", seconds_per_step={"sequential": 0.0042, "stacked": 0.0011})
    for epoch in range(1, epochs + 1):
        hooks.epoch_started(ensemble=None, epoch=epoch, num_epochs=epochs, num_members=3, num_steps=5)
        for step in range(1, 6):
            hooks.step_finished(epoch=epoch, step=step, num_steps=5, num_samples=64, objective=None, learning_rate=0.1)
        hooks.epoch_finished(epoch=epoch, num_epochs=epochs, metrics=ROW | {"epoch": epoch})
        hooks.checkpoint_saved(epoch=epoch, step=0, path=run.path)
    end(progress, run)
    progress.close()


def end(progress: Progress, run: FakeRun, status: str = "finished") -> None:
    RunHooks([], [progress]).call.run_ended(
        status=status, metrics=run.metrics, members=run.members, seconds=run.seconds, error=None
    )


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def terminal() -> tuple[RichProgress, io.StringIO]:
    screen = io.StringIO()
    progress = RichProgress()
    variables = {"TERM": "xterm"}  # and not those of who runs the test
    console = Console(
        file=screen, force_terminal=True, width=150, highlight=False, color_system=None, _environ=variables
    )
    progress.printer.console, progress.printer.for_a_person = console, True
    progress.bar.live.console = console
    return progress, screen


def test_progress_itself_is_silent(capsys):
    tell(Progress())
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_the_plan_one_line_per_epoch_and_the_summary(capsys):
    tell(PlainProgress())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "plan"
    assert lines[3] == "method  gncl [lambda]"
    assert lines[4] == "engine stacked; measured per step: stacked 1.1 ms, sequential 4.2 ms"
    repeat = "the engine decides the last bits: --set engine.name=stacked repeats this very run"
    quality = "train loss 0.500  loss 0.250  accuracy 95.10 %  diversity 0.031  validation 94.00 %"
    assert lines[5:7] == [f"epoch {epoch}/2  {quality}  12,346 samples/s  1.2 s" for epoch in (1, 2)]
    rest = lines[7:]
    assert rest.count(repeat) == 1
    assert any(line.split()[:2] == ["ensemble", "98.30"] for line in rest)
    assert "ensemble loss 0.071 = mean member 0.098 - diversity 0.031 + remainder 0.004" in rest
    assert "the run is in runs/digits-1" in rest
    assert rest[-3].startswith("  ensemblekit evaluate runs/digits-1  # ")


def test_no_line_on_a_pipe_is_coloured_or_wrapped(capsys):
    progress = PlainProgress()
    progress.show_plan([("model", "word " * 60)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


def test_regression_shows_squared_errors(capsys):
    row = {"epoch": 3, "test_mse": 2900.0, "test_r2": 0.51, "seconds": 0.1}
    assert epoch_line(row, 60) == "epoch  3/60  mse 2,900  R² 0.510  0.1 s"
    tell(PlainProgress(), run=FakeRun(metrics=REGRESSION_METRICS, members=members(2, "mse")))
    assert "% of squared error ahead of" in capsys.readouterr().out


def test_an_epoch_without_evaluation_shows_what_is_known():
    row = {"epoch": 2, "train_loss": 0.5, "test_accuracy": None}
    assert epoch_line(row, 10) == "epoch  2/10  train loss 0.500"


def test_a_step_of_a_second_or_more_is_shown_in_seconds():
    line = engine_line("stacked", {"stacked": 1.18, "threaded": 12.5, "sequential": 0.9994})
    assert line == "engine stacked; measured per step: sequential 999 ms, stacked 1.18 s, threaded 12.50 s"


def test_an_engine_that_the_spec_names_needs_no_advice(capsys):
    RunHooks([], [PlainProgress()]).call.engine_chosen(engine="stacked", seconds_per_step={})
    assert capsys.readouterr().out == "engine stacked\n"


def test_an_engine_that_the_spec_names_was_not_measured():
    assert engine_line("sequential", {}) == "engine sequential"


def test_a_terminal_gets_a_panel_a_bar_in_each_epoch_and_the_summary(terminal, clock):
    progress, screen = terminal
    progress.run_started(FakeRun().spec, FakeRun().path, PLAN)
    assert "╭─ plan" in screen.getvalue()
    assert "gncl [lambda]" in screen.getvalue()  # not taken for markup
    progress.epoch_started(1, 10, 5)
    for _ in range(1, 5):
        clock.now += 1
        progress.step_finished(64)
    shown = screen.getvalue()
    assert "epoch 1/10" in shown
    # 50 steps of a second each, 4 of them done
    assert "64 samples/s  0:00:46 left of 0:00:50" in shown
    assert "━" in shown
    progress.epoch_finished(10, ROW)
    progress.epoch_started(2, 10, 5)
    assert "accuracy 95.10 %  diversity 0.031" in screen.getvalue().rpartition("epoch 2/10")[2]
    end(progress, FakeRun())
    assert "the run is in runs/digits-1" in screen.getvalue()


def test_steps_draw_only_now_and_then(terminal, clock):
    progress, screen = terminal
    progress.epoch_started(1, 1, 1000)
    drawn = len(screen.getvalue())
    for _ in range(1, 1000):
        progress.step_finished(64)
    assert len(screen.getvalue()) == drawn
    clock.now += 1
    progress.step_finished(64)
    assert len(screen.getvalue()) > drawn


def test_closing_in_the_middle_of_an_epoch_gives_the_cursor_back(terminal):
    progress, screen = terminal
    progress.epoch_started(1, 1, 10)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert screen.getvalue().count(hidden) > screen.getvalue().count(shown)
    progress.close()
    progress.close()
    assert screen.getvalue().rfind(shown) > screen.getvalue().rfind(hidden)


def test_closing_a_terminal_that_is_gone_is_no_error(terminal, monkeypatch):
    def gone(text: str) -> int:
        raise OSError(5, "Input/output error")

    progress, screen = terminal
    progress.epoch_started(1, 1, 10)
    monkeypatch.setattr(screen, "write", gone)
    progress.close()


def test_a_resumed_run_counts_only_what_is_left(clock):
    counter = RunClock()
    counter.epoch_started(9, 10, 4)
    for _ in range(4):
        clock.now += 2
        counter.step_finished(10)
    assert counter.texts() == ["5 samples/s", "0:00:08 left of 0:00:16"]


def test_time_is_not_guessed_from_the_first_steps(clock):
    counter = RunClock()
    counter.epoch_started(1, 2, 4)
    counter.step_finished(10)
    assert counter.texts() == []


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_that_has_not_finished_has_no_summary(status, capsys):
    progress = PlainProgress()
    progress.run_started(FakeRun().spec, FakeRun().path, PLAN)
    end(progress, FakeRun(), status)
    assert "the run is in" not in capsys.readouterr().out


def test_quiet_is_silent_and_a_pipe_is_plain(capsys):
    assert type(choose_progress(quiet=True)) is Progress
    assert type(choose_progress(quiet=False)) is PlainProgress


def test_a_terminal_is_given_the_live_display(monkeypatch):
    monkeypatch.setattr("sys.stdout", _Terminal())
    assert type(choose_progress(quiet=False)) is RichProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
