"""Two runs in one process would change each other's random numbers and threads: the second is refused."""

from __future__ import annotations

import os
import threading

import pytest
from helpers.small_runs import assert_same_run, small_spec

import ensemblekit as ek
from ensemblekit.core.errors import UsageError
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.display.progress import Progress
from ensemblekit.training import only_run
from ensemblekit.training.only_run import only_run_of_process


class TrainAnother(Progress):
    """Trains another run, in another thread, while this one is in its first epoch."""

    def __init__(self, path) -> None:
        self.path, self.errors = path, []

    @hookimpl
    def step_finished(self, epoch, step):
        if (epoch, step) == (1, 2):
            thread = threading.Thread(target=self._train)
            thread.start()
            thread.join()

    def _train(self) -> None:
        try:
            ek.train(small_spec(), self.path, progress=False)
        except UsageError as error:
            self.errors.append(error)


def test_a_second_run_in_another_thread_is_refused_and_the_first_is_unharmed(tmp_path):
    ek.train(small_spec(), tmp_path / "alone", progress=False)
    other = TrainAnother(tmp_path / "second")
    ek.train(small_spec(), tmp_path / "first", progress=other)
    (error,) = other.errors
    assert "another run is being trained in this process" in error.what
    assert "a process of its own" in error.fix
    assert not (tmp_path / "second").exists()
    assert_same_run(tmp_path / "alone", tmp_path / "first")


def test_after_a_run_has_failed_the_next_one_can_start():
    with pytest.raises(KeyError), only_run_of_process():
        raise KeyError
    with only_run_of_process():
        pass


def test_a_process_that_was_forked_meanwhile_can_train(monkeypatch):
    with only_run_of_process():
        monkeypatch.setattr(only_run.os, "getpid", lambda: os.getppid())  # as in a child
        with only_run_of_process():
            pass
        monkeypatch.undo()
        with pytest.raises(UsageError), only_run_of_process():
            pass
