"""Those who only watch a run cannot hurt it: a logger or a display that fails is left out, and the run says so."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from helpers.commands import run
from helpers.small_runs import assert_same_run, small_spec, training

import ensemblekit as ek
from ensemblekit.core.errors import PluginError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.display.progress import PlainProgress, Progress

SPEC = small_spec(training=training(epochs=2))


LOGGER = """
from ensemblekit import Extension, PluginError, hookimpl
class Logger(Extension):
    '''Fails in the first epoch.'''
    @hookimpl
    def epoch_finished(self, epoch):
        print("epoch", epoch)
        raise {failure}
    @hookimpl
    def run_ended(self, status):
        print("ended", status)
"""


def train_with_logger(folder, failure: str, progress=False) -> ek.Run:
    """Train with a logger that fails in the first epoch."""
    file = folder / "logger.py"
    file.write_text(LOGGER.format(failure=failure))
    return ek.train(
        ek.load_spec({**SPEC, "extensions": ["logger"]}, plugins=[file]), folder / "run", progress, plugins=[file]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run without any observer."""
    path = tmp_path_factory.mktemp("observers") / "whole"
    ek.train(SPEC, path, progress=False)
    return path


@pytest.mark.parametrize("failure", ["KeyError('lost')", "SystemExit(3)", "PluginError('broken')"])
def test_a_logger_that_raises_is_left_out_and_the_run_goes_on_to_the_same_bits(failure, whole, tmp_path, capsys):
    trained = train_with_logger(tmp_path, failure)
    assert capsys.readouterr().out == "epoch 1\nended finished\n"  # it can still close its files
    (notice,) = [text for text in trained.notices if "logger" in text]
    assert notice.startswith('extension "logger" failed in epoch_finished and is left out from now on: ')
    assert "logger.py, line 8" in notice
    assert_same_run(whole, tmp_path / "run")


def test_a_logger_that_cannot_start_refuses_the_run():
    class Missing(ek.Extension):
        """Needs a package."""

        @hookimpl
        def run_started(self):
            raise PluginError("its package is not installed", fix="pip install it")

    with pytest.raises(PluginError, match="not installed"):
        RunHooks([Missing()]).call.run_started(spec=None, path=None, plan=[])


def test_a_hook_of_a_method_that_raises_fails_the_run(tmp_path):
    class Careless(ek.Method):
        """Fails where an observer may."""

        @hookimpl
        def epoch_finished(self):
            raise KeyError("lost")

    with pytest.raises(KeyError):
        ek.train(replace(ek.load_spec(SPEC), methods=(Careless(),)), tmp_path / "run", progress=False)


class BrokenOutput:
    """Standard output that nobody reads any more, or that is full, closed or knows few characters."""

    encoding = "utf-8"

    def __init__(self, error: Exception) -> None:
        self.error, self.attempts = error, 0

    def write(self, text: str) -> int:
        self.attempts += 1
        raise self.error

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        OSError(28, "No space left on device"),
        ValueError("I/O operation on closed file."),
        UnicodeEncodeError("ascii", "R²", 1, 2, "ordinal not in range(128)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_display_that_cannot_write_is_silent_and_the_run_finishes(error, whole, tmp_path, monkeypatch):
    output = BrokenOutput(error)
    monkeypatch.setattr(sys, "stdout", output)
    trained = ek.train(SPEC, tmp_path / "run", progress=PlainProgress())
    monkeypatch.undo()
    assert trained.status == "finished"
    assert output.attempts == 1
    assert_same_run(whole, tmp_path / "run")


def test_each_observer_is_contained_by_itself(tmp_path):
    class Counts(Progress):
        """Counts epochs."""

        epochs = 0

        @hookimpl
        def epoch_finished(self):
            self.epochs += 1

    counts = Counts()
    train_with_logger(tmp_path, "KeyError('lost')", counts)
    assert counts.epochs == 2


def test_the_notice_about_a_logger_is_shown_and_the_command_ends_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logger.py").write_text(LOGGER.format(failure="SystemExit(0)"))
    (tmp_path / "spec.toml").write_text(ek.load_spec(SPEC).to_toml())
    result = run("train", "spec.toml", "--plugin", "logger.py", "--set", 'extensions=["logger"]', "--out", "run")
    assert result.exit_code == 0, result.stderr
    text = 'note: extension "logger" failed in epoch_finished and is left out from now on: SystemExit: 0'
    assert text in result.stdout
