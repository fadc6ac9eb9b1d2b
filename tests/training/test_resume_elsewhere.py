"""A run can go on with another engine, on another machine, or further than planned; what changes the bits is said."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.commands import last_error, run
from helpers.compiled_code import needs_compiled_code
from helpers.small_runs import Crash, CrashAfter, CrashOnSave, assert_same_run, rows, small_spec, training

import ensemblekit as ek
from ensemblekit.core import kernels
from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.core.threads import threads
from ensemblekit.display.progress import Progress
from ensemblekit.engines import threaded
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.training import environment as environment_module
from ensemblekit.training import resuming


def stopped(path, spec: dict | None = None) -> None:
    with pytest.raises(Crash):
        ek.train(spec or small_spec(method="gncl"), path, progress=CrashAfter(2, 2))


def changed_environment(path, **changes) -> None:
    """Let a run have been started on another machine."""
    directory = RunDirectory.open(path)
    directory.update_environment(**changes)


def bits_notices(run: ek.Run) -> list[str]:
    return [text for text in run.notices if "the last bits will differ" in text]


def test_a_threaded_run_goes_on_where_there_is_one_core_with_another_engine_and_says_so(tmp_path, monkeypatch):
    spec = small_spec(method="gncl", engine={"name": "threaded", "device": "cpu"})
    whole = ek.train(spec, tmp_path / "whole", progress=False)
    stopped(tmp_path / "run", spec)
    monkeypatch.setattr(threaded, "num_cores", lambda: 1)
    resumed = ek.resume(tmp_path / "run", progress=False)
    (notice,) = bits_notices(resumed)
    assert 'in place of "threaded" (there is only one core)' in notice
    assert resumed.metrics["test_loss"] == pytest.approx(whole.metrics["test_loss"], rel=1e-3)
    assert resumed.environment["resumed"][0]["engine"] in ("sequential", "stacked")


def test_another_engine_and_device_can_be_asked_for(tmp_path):
    stopped(tmp_path / "run")
    result = run("resume", str(tmp_path / "run"), "--engine", "stacked", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert 'note: engine "stacked" in place of "sequential" (as asked): the last bits will differ' in result.stdout
    assert ek.open_run(tmp_path / "run").spec.engine.name == "sequential"


@pytest.mark.parametrize(("option", "value"), [("engine", "fast"), ("device", "gpu")])
def test_an_engine_or_device_that_is_none_is_refused(option, value, tmp_path):
    stopped(tmp_path / "run")
    with pytest.raises(SpecError, match=f"engine.{'name' if option == 'engine' else 'device'}"):
        ek.resume(tmp_path / "run", progress=False, **{option: value})
    assert ek.open_run(tmp_path / "run").status != "finished"


class Threads(Progress):
    """Notes the number of torch's threads in training."""

    def __init__(self) -> None:
        self.seen = set()

    @hookimpl
    def step_finished(self):
        self.seen.add(torch.get_num_threads())


def test_a_run_goes_on_with_the_number_of_threads_that_it_was_started_with(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "cores_of_machine", lambda: 2)
    seen = Threads()
    with threads(2):
        stopped(tmp_path / "run")
    with threads(1):
        resumed = ek.resume(tmp_path / "run", progress=seen)
        assert torch.get_num_threads() == 1
    assert seen.seen == {2}
    assert bits_notices(resumed) == []


def test_threads_that_cannot_be_had_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "cores_of_machine", lambda: 1)
    with threads(1):
        stopped(tmp_path / "run")
        changed_environment(tmp_path / "run", threads=8)
        (notice,) = bits_notices(ek.resume(tmp_path / "run", progress=False))
    assert "threads 8 → 1" in notice


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("torch", "1.0", "torch 1.0 → "),
        ("cpu_capability", "NEON", "CPU kernels NEON → "),
        ("compiled_code", kernels.library() is None, "compiled code"),
    ],
)
def test_another_version_or_other_kernels_are_said(key, value, said, tmp_path):
    stopped(tmp_path / "run")
    changed_environment(tmp_path / "run", **{key: value})
    (notice,) = bits_notices(ek.resume(tmp_path / "run", progress=False))
    assert said in notice


@needs_compiled_code
def test_a_run_from_before_there_was_compiled_code_goes_on_with_it_and_says_so(tmp_path):
    facts = {key: value for key, value in environment_module.machine_facts().items() if key != "compiled_code"}
    (notice,) = resuming.machine_notices(facts)
    assert "compiled code now used" in notice


def test_a_run_on_the_same_machine_says_nothing_and_one_that_recorded_less_neither(tmp_path, monkeypatch):
    stopped(tmp_path / "run")
    facts = environment_module.machine_facts()
    assert {"torch", "threads", "cores", "cpu_capability", "compiled_code"} == set(facts)
    path = tmp_path / "run" / "environment.json"
    recorded = RunDirectory.open(tmp_path / "run").environment
    assert facts.items() <= recorded.items()
    assert path.exists()
    assert list(resuming.machine_notices({"engine": "sequential"})) == []
    assert bits_notices(ek.resume(tmp_path / "run", progress=False)) == []


def test_resuming_a_finished_run_says_so_and_what_can_be_done(tmp_path):
    trained = ek.train(small_spec(), tmp_path / "run", progress=False)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    result = run("resume", str(tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    for part in ("the run has finished (3 epochs)", "evaluate", "predict", f"resume {trained.path} --epochs 6"):
        assert part in result.stdout
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
@pytest.mark.parametrize("schedule", ["constant", {"name": "step", "every": 2}], ids=["constant", "step"])
def test_a_run_that_is_trained_further_is_the_run_of_so_many_epochs(schedule, finished, tmp_path):
    spec = small_spec(method="gncl", training=training(schedule=schedule))
    ek.train(ek.load_spec(spec, {"training.epochs": 5}), tmp_path / "whole", progress=False)
    if finished:
        ek.train(spec, tmp_path / "run", progress=False)
    else:
        stopped(tmp_path / "run", spec)
    result = run("resume", str(tmp_path / "run"), "--epochs", "5")
    assert result.exit_code == 0, result.stderr
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    longer = ek.open_run(tmp_path / "run")
    assert (longer.spec.training.epochs, longer.status, len(longer.history)) == (5, "finished", 5)
    assert (tmp_path / "run" / "spec.toml").read_text() == (tmp_path / "whole" / "spec.toml").read_text()


def test_from_the_continuation_on_a_cosine_is_that_of_all_epochs(tmp_path):
    spec = small_spec(training=training(epochs=2, schedule="cosine"))
    ek.train(spec, tmp_path / "run", progress=False)
    longer = ek.resume(tmp_path / "run", progress=False, epochs=4)
    whole = ek.train(ek.load_spec(spec, {"training.epochs": 4}), tmp_path / "whole", progress=False)
    rates, expected = ([row["learning_rate"] for row in found.history] for found in (longer, whole))
    assert rates[2:] == expected[2:]
    assert rates[:2] != expected[:2]


@pytest.mark.parametrize(
    ("method", "epochs", "said"),
    [
        (None, 3, "the run has 3 finished epochs already"),
        ({"name": "boosting", "schedule": "stagewise"}, 9, '"boosting" plans its members over all epochs'),
        ({"name": "snapshot", "cycles": 3}, 9, '"snapshot" plans its members over all epochs'),
    ],
    ids=["too few", "boosting", "snapshot"],
)
def test_a_run_that_cannot_be_trained_further_is_left_as_it_is(method, epochs, said, tmp_path):
    spec = small_spec() if method is None else small_spec(method=method)
    ek.train(spec, tmp_path / "run", progress=False)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    result = run("resume", str(tmp_path / "run"), "--epochs", str(epochs))
    assert result.exit_code == 2
    assert said in last_error(result)
    assert {path: path.read_bytes() for path in files} == files


def test_snapshots_at_given_epochs_can_be_trained_further(tmp_path):
    spec = small_spec(method={"name": "snapshot", "at_epochs": [2, 3]})
    ek.train(spec, tmp_path / "run", progress=False)
    assert len(ek.resume(tmp_path / "run", progress=False, epochs=4).members) == 3


def test_patience_counts_anew_in_a_run_that_is_trained_further(tmp_path):
    section = {"epochs": 30, "batch_size": 20, "patience": 1, "optimizer": {"name": "sgd", "lr": 1.0}}
    first = ek.train(small_spec(training=section), tmp_path / "run", progress=False)
    stopped_after = len(first.history)
    assert stopped_after < 30
    with pytest.raises(Crash):  # also if it is killed before the next epoch is saved
        ek.resume(tmp_path / "run", progress=CrashAfter(stopped_after + 1, 1), epochs=40)
    assert len(ek.resume(tmp_path / "run", progress=False).history) > stopped_after


def test_a_crash_while_a_run_is_lengthened_leaves_a_run_that_can_be_resumed(tmp_path, monkeypatch):
    ek.train(small_spec(), tmp_path / "run", progress=False)
    old = (tmp_path / "run" / "spec.toml").read_bytes()
    with pytest.raises(Crash):
        ek.resume(tmp_path / "run", progress=CrashOnSave(4), epochs=5)
    (tmp_path / "run" / "spec.toml").write_bytes(old)  # as if it had been killed just before this was written
    assert len(ek.resume(tmp_path / "run", progress=False).history) == 5
    assert json.loads((tmp_path / "run" / "result.json").read_text())["epochs"] == 5
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_more_epochs_for_a_run_that_stands_in_the_middle_of_one(tmp_path):
    spec = small_spec(training=training(epochs=2, checkpoint_every_minutes=1e-9))
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "run", progress=CrashOnSave(1, 2))
    ek.resume(tmp_path / "run", progress=False, epochs=3)
    ek.train(small_spec(), tmp_path / "whole", progress=False)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_fewer_epochs_than_finished_are_refused_in_python(tmp_path):
    ek.train(small_spec(), tmp_path / "run", progress=False)
    with pytest.raises(UsageError, match="ask for more than 3"):
        ek.resume(tmp_path / "run", progress=False, epochs=2)


def test_a_finished_run_stays_finished_if_it_cannot_go_on(tmp_path):
    """Nothing of a finished run is given up before the data of the longer run is there."""
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = (inputs, (inputs.sum(dim=1) > 0).long())
    spec = {"model": {"name": "linear"}, "training": {"epochs": 1}, "engine": {"name": "sequential", "device": "cpu"}}
    run = ek.train(spec, tmp_path / "run", progress=False, data=data, model=lambda: torch.nn.Linear(3, 2))
    for other in (None, (inputs, 1 - data[1])):
        with pytest.raises(ek.DataError):
            ek.resume(run.path, progress=False, data=other, model=lambda: torch.nn.Linear(3, 2), epochs=3)
    assert ek.open_run(run.path, model=lambda: torch.nn.Linear(3, 2)).metrics == run.metrics
    longer = ek.resume(run.path, progress=False, data=data, model=lambda: torch.nn.Linear(3, 2), epochs=3)
    assert len(longer.history) == 3
