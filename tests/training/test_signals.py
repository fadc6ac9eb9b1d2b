"""Ctrl-C, SIGTERM and SIGHUP in every phase of a run: a word, the right exit code, and nothing lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from helpers.commands import last_error, run
from helpers.small_runs import Crash, CrashAfter, SignalAfter, assert_same_run, checkpoints, small_spec

import ensemblekit as ek
from ensemblekit import api
from ensemblekit.core.errors import Interrupted
from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.training import engine_in_use
from ensemblekit.training import trainer as trainer_module
from ensemblekit.training.interruption import stop_requests

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def handlers():
    """The handlers are afterwards those from before."""
    before = {number: signal.getsignal(number) for number in CODES}
    yield
    assert {number: signal.getsignal(number) for number in CODES} == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody disturbed."""
    path = tmp_path_factory.mktemp("signals") / "whole"
    ek.train(small_spec(method="gncl"), path, progress=False)
    return path


def stopped_by(progress: SignalAfter, path) -> Interrupted:
    with pytest.raises(Interrupted) as error:
        ek.train(small_spec(method="gncl"), path, progress=progress)
    return error.value


@pytest.mark.parametrize(("number", "code"), CODES.items(), ids=lambda value: str(value))
def test_a_signal_in_an_epoch_saves_the_very_step(number, code, whole, tmp_path):
    error = stopped_by(SignalAfter(number, 2, 3), tmp_path / "run")
    assert error.exit_code == code
    assert error.what == "saved at epoch 1, step 3"
    assert error.fix == f"continue with: ensemblekit resume {tmp_path / 'run'}"
    assert ek.open_run(tmp_path / "run").status == "interrupted"
    assert checkpoints(tmp_path / "run")[-1] == "epoch-000001-step-000003"
    ek.resume(tmp_path / "run", progress=False)
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("progress", "saved"),
    [
        (SignalAfter(signal.SIGTERM, 1, hook="epoch_finished"), "saved at epoch 1"),
        (SignalAfter(signal.SIGTERM, 2, hook="checkpoint_saved"), "saved at epoch 2"),
        (SignalAfter(signal.SIGTERM, 0, hook="checkpoint_saved"), "saved at epoch 0"),
        (SignalAfter(signal.SIGTERM, 3, 4), "saved at epoch 2, step 4"),
    ],
    ids=["after evaluation", "in a save", "in the first save", "after the last step"],
)
def test_a_signal_between_epochs_loses_nothing(progress, saved, whole, tmp_path):
    error = stopped_by(progress, tmp_path / "run")
    assert (error.what, error.exit_code) == (saved, 143)
    ek.resume(tmp_path / "run", progress=False)
    assert_same_run(whole, tmp_path / "run")


def test_a_signal_in_an_evaluation_saves_the_steps_before_it(whole, tmp_path, monkeypatch):
    predict = SequentialEngine._predict_here

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return predict(*arguments)

    monkeypatch.setattr(SequentialEngine, "_predict_here", interrupted)
    error = stopped_by(SignalAfter(signal.SIGINT), tmp_path / "run")
    assert error.what == "saved at epoch 0, step 4"
    monkeypatch.undo()
    ek.resume(tmp_path / "run", progress=False)
    assert_same_run(whole, tmp_path / "run")


def test_a_second_signal_stops_at_once_with_the_code_of_the_first(tmp_path):
    error = stopped_by(SignalAfter(signal.SIGTERM, 2, 1, times=2), tmp_path / "run")
    assert error.exit_code == 143
    assert error.what == "stopped at once: the checkpoint of epoch 1 is kept"
    assert "ensemblekit resume" in error.fix
    assert ek.open_run(tmp_path / "run").status == "interrupted"


@pytest.mark.parametrize(("number", "code"), CODES.items(), ids=lambda value: str(value))
@pytest.mark.parametrize("phase", ["load_data", "choose_engine"])
def test_a_signal_before_training_says_that_nothing_was_started(phase, number, code, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        os.kill(os.getpid(), number)
        pytest.fail("it went on")

    module = engine_in_use if phase == "choose_engine" else trainer_module
    monkeypatch.setattr(module, phase, interrupted)
    with pytest.raises(Interrupted) as error:
        ek.train(small_spec(engine={"name": "auto"}), tmp_path / "run", progress=False)
    assert error.value.exit_code == code
    assert (error.value.what, error.value.fix) == ("nothing was started yet", "run the command again")
    assert not (tmp_path / "run").exists()


def test_a_signal_while_a_resume_loads_says_that_nothing_was_changed(tmp_path, monkeypatch):
    with pytest.raises(Crash):
        ek.train(small_spec(), tmp_path / "run", progress=CrashAfter(2, 1))
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    result = run("resume", str(tmp_path / "run"))
    assert result.exit_code == 129
    assert last_error(result).startswith("error: nothing was changed; ")
    assert f"ensemblekit resume {tmp_path / 'run'}" in last_error(result)


def test_the_command_is_covered_from_before_the_spec_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load_spec", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = run("train", "digits", "--out", str(tmp_path / "run"))
    assert result.exit_code == 143
    assert last_error(result) == "error: nothing was started yet; run the command again"


def test_a_signal_that_the_process_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        ek.train(small_spec(), tmp_path / "run", progress=SignalAfter(signal.SIGHUP, 1, 1))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ek.open_run(tmp_path / "run").status == "finished"


def test_blocks_inside_each_other_share_one_request_and_threads_have_none():
    with stop_requests() as outer, stop_requests() as inner:
        assert inner is outer
        found = []

        def other() -> None:
            with stop_requests() as request:
                found.append(request)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert found[0] is not outer


def test_a_run_that_was_interrupted_before_its_first_epoch_can_be_resumed(whole, tmp_path):
    error = stopped_by(SignalAfter(signal.SIGINT, 0, hook="checkpoint_saved"), tmp_path / "run")
    assert "ensemblekit resume" in error.fix
    assert RunDirectory.open(tmp_path / "run").checkpoint_epochs == [0]
    ek.resume(tmp_path / "run", progress=False)
    assert_same_run(whole, tmp_path / "run")
