"""What trackers log of a run that was killed and resumed, read back by means that are not theirs."""

from __future__ import annotations

import csv
import fcntl
import os
import sys
from pathlib import Path

import pytest
from ensemblekit_extensions import mlflow
from ensemblekit_extensions.csv_file import CSVFile
from ensemblekit_extensions.tracker import TrackedRun, flattened
from helpers import tiny_runs, wandb_files
from helpers.small_runs import TIMES, Crash, CrashAfter, SignalAfter
from helpers.tracked_runs import Tracked

import ensemblekit as ek


def numbers(row: dict) -> dict:
    return {name: value for name, value in row.items() if name != "epoch" and value is not None}


def test_a_csv_file_has_each_epoch_of_a_killed_and_resumed_run_once(killed_and_resumed):
    with (killed_and_resumed.run.path / "metrics.csv").open() as file:
        header, *rows = csv.reader(file)
    read = [{name: float(text) for name, text in zip(header, row, strict=True) if text} for row in rows]
    assert read == [numbers(row) | {"epoch": row["epoch"]} for row in killed_and_resumed.run.history]
    assert header == list(killed_and_resumed.run.history[1])  # that of the first evaluated epoch
    assert [row["epoch"] for row in read] == [1, 2, 3]


def test_mlflow_has_each_epoch_of_a_resumed_run_once(crashed_and_resumed):
    store, logged, history = crashed_and_resumed.store, crashed_and_resumed.mlflow_run, crashed_and_resumed.run.history
    for name in numbers(history[-1]):
        read = store.get_metric_history(logged.info.run_id, name)
        assert [point.step for point in read] == [1, 2, 3, 4], name
        if name not in TIMES:  # that of epoch 2 is the time of its first training
            assert [point.value for point in read] == pytest.approx([row[name] for row in history]), name
    assert len(store.search_runs([logged.info.experiment_id])) == 1


def test_mlflow_has_the_spec_the_environment_and_the_result(crashed_and_resumed):
    logged, run = crashed_and_resumed.mlflow_run, crashed_and_resumed.run
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "crashed"
    assert "error" not in logged.data.tags
    assert logged.data.params["training.batch_size"] == "20"
    assert logged.data.params["engine.name"] == "sequential"
    assert logged.data.tags["environment.torch"] == run.environment["torch"]
    assert logged.data.tags["team"] == "a"
    assert logged.data.metrics["final/test_accuracy"] == pytest.approx(run.metrics["test_accuracy"])


def test_mlflow_has_the_report_among_the_artifacts(crashed_and_resumed):
    store, run_id = crashed_and_resumed.store, crashed_and_resumed.mlflow_run.info.run_id
    names = {artifact.path for artifact in store.list_artifacts(run_id)}
    assert names == {"spec.toml", "environment.json", "result.json", "report.html"}
    assert "</html>" in Path(store.download_artifacts(run_id, "report.html")).read_text()


def test_mlflow_shows_a_parameter_that_was_changed_by_training_further(crashed_and_resumed):
    logged = crashed_and_resumed.mlflow_run
    assert (logged.data.params["training.epochs"], logged.data.tags["training.epochs"]) == ("3", "4")


def test_the_newest_offline_file_of_wandb_has_every_epoch_once(killed_and_resumed):
    first, last = killed_and_resumed.wandb_files
    rows = wandb_files.history(last)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    names = {"_step", "_timestamp", "_runtime"}
    read = [{name: value for name, value in row.items() if name not in names} for row in rows]
    assert read == [numbers(row) for row in killed_and_resumed.run.history]
    assert wandb_files.history(first) == []  # what wandb had not written when it was killed, is lost there
    assert wandb_files.exit_code(last) == 0


def test_wandb_has_the_spec_the_environment_the_result_and_the_report(killed_and_resumed):
    file = killed_and_resumed.wandb_files[-1]
    config, run = wandb_files.config(file), killed_and_resumed.run
    assert config["training"]["epochs"] == 3
    assert config["environment"]["torch"] == run.environment["torch"]
    assert wandb_files.summary(file)["final/test_accuracy"] == pytest.approx(run.metrics["test_accuracy"])
    artifacts = wandb_files.artifact_files(file)
    assert set(artifacts) == {"spec.toml", "result.json", "report.html"}
    assert "</html>" in artifacts["report.html"].read_text()


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
