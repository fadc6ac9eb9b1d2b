"""What trackers log of a run that was killed and resumed, read back by means that are not theirs."""

from __future__ import annotations

import csv
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ensemblekit_extensions import mlflow
from ensemblekit_extensions.csv_file import CSVFile
from ensemblekit_extensions.tracker import TrackedRun, flattened
from helpers import tiny_runs, wandb_files
from helpers.small_runs import TIMES, Crash, CrashAfter, SignalAfter
from helpers.tracked_runs import KILLED, CrashAfterLog, Tracked, page_of

import ensemblekit as ek


def numbers(row: dict) -> dict:
    return {name: value for name, value in row.items() if name != "epoch" and value is not None}


# One test for each of two runs, with all its claims: the runs take seconds, and tests may be spread over processes.


def test_csv_and_wandb_have_all_of_a_killed_and_resumed_run_and_each_epoch_once(tracker_settings):
    command = [sys.executable, "-c", KILLED]  # killed when epoch 2 was logged, but not yet saved
    assert subprocess.run(command, cwd=tracker_settings, check=False).returncode == -signal.SIGKILL
    tracked = Tracked(tracker_settings, ek.resume("killed", progress=False))
    assert_csv_has_each_epoch_once(tracked.run)
    first, last = tracked.wandb_files
    assert wandb_files.history(first) == []  # what wandb had not written when it was killed, is lost there
    assert_wandb_has_each_epoch_once(last, tracked.run)
    config = wandb_files.config(last)
    assert config["training"]["epochs"] == 3
    assert config["environment"]["torch"] == tracked.run.environment["torch"]
    assert wandb_files.summary(last)["final/test_accuracy"] == pytest.approx(tracked.run.metrics["test_accuracy"])
    assert wandb_files.exit_code(last) == 0
    artifacts = wandb_files.artifact_files(last)
    assert set(artifacts) == {"spec.toml", "result.json", "report.html"}
    assert "</html>" in artifacts["report.html"].read_text()


def assert_csv_has_each_epoch_once(run: ek.Run) -> None:
    with (run.path / "metrics.csv").open() as file:
        header, *rows = csv.reader(file)
    read = [{name: float(text) for name, text in zip(header, row, strict=True) if text} for row in rows]
    assert read == [numbers(row) | {"epoch": row["epoch"]} for row in run.history]
    assert header == list(run.history[1])  # that of the first evaluated epoch
    assert [row["epoch"] for row in read] == [1, 2, 3]


def assert_wandb_has_each_epoch_once(file: Path, run: ek.Run) -> None:
    rows = wandb_files.history(file)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    own = {"_step", "_timestamp", "_runtime"}
    read = [{name: value for name, value in row.items() if name not in own} for row in rows]
    assert read == [numbers(row) for row in run.history]


def test_mlflow_has_all_of_a_failed_and_resumed_run_and_each_epoch_once(tracker_settings, monkeypatch):
    monkeypatch.setattr(ek, "report", page_of, raising=False)
    extension = {"name": "mlflow", "tracking_uri": "sqlite:///store.db", "tags": {"team": "a"}}
    with pytest.raises(Crash):
        ek.train({**tiny_runs.SPEC, "extensions": [extension]}, "run", progress=CrashAfterLog())
    failed = Tracked(tracker_settings, ek.open_run("run")).mlflow_run
    assert failed.info.status == "FAILED"
    assert failed.data.tags["error"] == "Crash"
    monkeypatch.chdir("/")  # the address of the database is relative to where the run was started
    tracked = Tracked(tracker_settings, ek.resume(tracker_settings / "run", progress=False, epochs=4))
    logged, store = tracked.mlflow_run, tracked.store
    assert logged.info.run_id == failed.info.run_id
    assert_mlflow_has_each_epoch_once(tracked)
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", "run")
    assert "error" not in logged.data.tags
    assert logged.data.params["engine.name"] == "sequential"
    assert (logged.data.params["training.epochs"], logged.data.tags["training.epochs"]) == ("3", "4")
    assert logged.data.tags["environment.torch"] == tracked.run.environment["torch"]
    assert logged.data.tags["team"] == "a"
    assert logged.data.metrics["final/test_accuracy"] == pytest.approx(tracked.run.metrics["test_accuracy"])
    names = {artifact.path for artifact in store.list_artifacts(logged.info.run_id)}
    assert names == {"spec.toml", "environment.json", "result.json", "report.html"}
    assert Path(store.download_artifacts(logged.info.run_id, "report.html")).read_text() == "a page"


def assert_mlflow_has_each_epoch_once(tracked: Tracked) -> None:
    run_id, history = tracked.mlflow_run.info.run_id, tracked.run.history
    for name in numbers(history[-1]):
        read = tracked.store.get_metric_history(run_id, name)
        assert [point.step for point in read] == [1, 2, 3, 4], name
        if name not in TIMES:  # that of epoch 2 is the time of its first training
            assert [point.value for point in read] == pytest.approx([row[name] for row in history]), name


@pytest.mark.parametrize("name", ["failed", "interrupted"])
def test_wandb_is_told_that_a_run_failed_or_was_interrupted(tracker_settings, name):
    path = tracker_settings / name
    extensions = [{"name": "wandb", "mode": "offline", "report": False}]
    display = CrashAfter(2, 1) if name == "failed" else SignalAfter(15, 2, 1)
    with pytest.raises(Crash if name == "failed" else ek.EnsemblekitError):
        ek.train({**tiny_runs.SPEC, "extensions": extensions}, path, progress=display)
    [file] = Tracked(tracker_settings, ek.open_run(path)).wandb_files
    assert wandb_files.exit_code(file) == {"failed": 1, "interrupted": 255}[name]
    assert [row["_step"] for row in wandb_files.history(file)] == [1]
    assert wandb_files.summary(file)["error"]


def test_a_csv_file_elsewhere_is_not_overwritten_by_another_run(tmp_path):
    file = tmp_path / "all.csv"
    extensions = [{"name": "csv", "path": str(file)}]
    tiny = {**tiny_runs.SPEC, "extensions": extensions}
    ek.train(tiny, tmp_path / "a", progress=False)
    content = file.read_bytes()
    with pytest.raises(ek.UsageError, match="exists already"):
        ek.train(tiny, tmp_path / "b", progress=False)
    assert file.read_bytes() == content
    assert not (tmp_path / "b").exists()
    ek.resume(tmp_path / "a", progress=False, epochs=4)
    assert [line.split(",")[0] for line in file.read_text().splitlines()] == ["epoch", "1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_found_before_anything_is_trained(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # importing it is now an ImportError
    spec = {**tiny_runs.SPEC, "extensions": [{"name": name}]}
    with pytest.raises(ek.PluginError, match=rf"pip install 'ensemblekit\[{name}\]'") as caught:
        ek.train(spec, tmp_path / "run", progress=False)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_be_reached_does_not_hurt_the_run(tmp_path, tracker_settings):
    (tmp_path / "file").write_text("not a directory")
    uri = f"sqlite:///{tmp_path}/file/store.db"
    spec = {**tiny_runs.SPEC, "extensions": [{"name": "mlflow", "tracking_uri": uri}]}
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert run.status == "finished"
    assert any('extension "mlflow" failed' in text for text in run.notices)


def test_one_process_at_a_time_opens_a_local_database(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    with mlflow._alone(f"sqlite:///{tmp_path}/store.db"), pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # is free again
    os.close(folder)


def test_a_run_of_a_sweep_knows_its_sweep(tmp_path):
    run = tmp_path / "lambdas" / "runs" / "a"
    run.mkdir(parents=True)
    assert TrackedRun(run).sweep is None
    (tmp_path / "lambdas" / "sweep.toml").touch()
    assert TrackedRun(run).sweep == "lambdas"


def test_nested_tables_are_flattened_to_dotted_paths():
    tables = {"seed": 1, "methods": [{"name": "gncl"}], "training": {"optimizer": {"lr": 0.1}}, "hidden": [3, 4]}
    flat = {"seed": 1, "methods.0.name": "gncl", "training.optimizer.lr": 0.1, "hidden": [3, 4]}
    assert flattened(tables) == flat


def test_a_spec_that_is_trained_twice_has_two_files(tmp_path):
    spec = ek.load_spec({**tiny_runs.SPEC, "extensions": [{"name": "csv"}]}, {"training.epochs": 1})
    assert isinstance(spec.extensions[0], CSVFile)
    for name in "ab":
        ek.train(spec, tmp_path / name, progress=False)
        assert len((tmp_path / name / "metrics.csv").read_text().splitlines()) == 2
