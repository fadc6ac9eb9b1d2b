"""The listing of runs: every status, every kind of damage, sorting, and the forms in which it is printed."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import last_error
from helpers.commands import run as command
from helpers.places import TOY_PLUGINS
from helpers.small_runs import SignalAfter, small_spec
from helpers.tiny_runs import SPEC, content, train

import ensemblekit as ek
from ensemblekit.analysis.run_list import ListedRun
from ensemblekit.core.errors import Interrupted, NumericError, PluginError, UsageError
from ensemblekit.runs.directory import RunDirectory

GOLDEN = Path(__file__).parents[1] / "runs" / "golden"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every status that a run can have by itself."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "finished")
    signal_after = SignalAfter(signal.SIGTERM, epoch=2, hook="epoch_finished")
    with pytest.raises(Interrupted):
        ek.train(SPEC, folder / "sweep" / "runs" / "lambda=0.5,seed=1", progress=signal_after)
    with pytest.raises(NumericError):
        train(folder / "failed", optimizer={"name": "sgd", "lr": 1e30})
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def by_name(folder: Path) -> dict[str, ListedRun]:
    return {run.name: run for run in ek.list_runs(folder)}


def test_every_run_below_a_directory_is_listed_with_its_status_and_measures(folder):
    before = content(folder)
    listed = by_name(folder)
    assert set(listed) == {"finished", "failed", "sweep/runs/lambda=0.5,seed=1"}
    finished, run = listed["finished"], ek.open_run(folder / "finished")
    assert (finished.status, finished.status_text, finished.epoch) == ("finished", "finished", 3)
    assert (finished.method, finished.model, finished.members, finished.data) == ("gncl", "mlp", 2, "digits")
    measures = finished.accuracy, finished.loss, finished.diversity
    assert measures == tuple(run.metrics[f"test_{name}"] for name in ("accuracy", "loss", "diversity"))
    assert finished.mse is None
    assert finished.seconds == pytest.approx(sum(run.seconds.values()))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", finished.started)
    assert content(folder) == before


def test_an_interrupted_run_says_at_which_epoch_and_has_the_measures_of_its_last_one(folder):
    listed = by_name(folder)["sweep/runs/lambda=0.5,seed=1"]
    history = ek.open_run(listed.path).history
    assert (listed.status, listed.status_text) == ("interrupted", "interrupted at epoch 2")
    assert (listed.loss, len(history)) == (history[-1]["test_loss"], 2)
    assert listed.seconds == pytest.approx(sum(row["seconds"] for row in history))


def test_a_failed_run_says_why(folder):
    listed = by_name(folder)["failed"]
    assert listed.status == "failed"
    assert "nan or infinite" in listed.reason
    assert listed.status_text == f"failed: {listed.reason}"
    assert listed.reason == ek.open_run(folder / "failed").error


def test_a_run_in_training_is_running(folder):
    path = folder / "sweep" / "runs" / "lambda=0.5,seed=1"
    with RunDirectory.open(path).lock():
        assert by_name(folder)["sweep/runs/lambda=0.5,seed=1"].status_text == "running at epoch 2"


def test_a_run_that_was_stopped_while_it_started_is_interrupted(folder):
    for path in (folder / "failed").rglob("*"):
        if path.is_file() and path.name not in ("spec.toml", "environment.json", ".lock"):
            path.unlink()
    assert by_name(folder)["failed"].status_text == "interrupted at epoch 0"


DAMAGE = {
    "run.json": "not JSON; run.json holds",
    "result.json": "not JSON; result.json holds the final metrics",
    "spec.toml": "the spec was changed and is no longer valid TOML",
    "metrics.jsonl": "",  # a finished run is listed without it
}


@pytest.mark.parametrize("file", DAMAGE)
def test_damage_is_listed_with_its_reason_and_stops_nothing(folder, file):
    (folder / "finished" / file).write_text("{ broken")
    listed = by_name(folder)
    assert len(listed) == 3
    assert listed["finished"].status == ("damaged" if DAMAGE[file] else "finished")
    assert (listed["finished"].reason or "").startswith(DAMAGE[file])
    assert listed["sweep/runs/lambda=0.5,seed=1"].status == "interrupted"


@pytest.mark.parametrize("file", ["run.json", "result.json", "model.safetensors", "model.json", "outputs.safetensors"])
def test_a_missing_file_is_damage(folder, file):
    (folder / "finished" / file).unlink()
    listed = by_name(folder)["finished"]
    assert listed.status == "damaged"
    assert listed.reason.startswith(f"{file} is missing")
    if file != "run.json":
        assert listed.method == "gncl"  # what can be read is shown


def test_damaged_metrics_of_an_unfinished_run_are_damage(folder):
    path = folder / "sweep" / "runs" / "lambda=0.5,seed=1"
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace('"epoch": 1', '"epoch": 7'))
    assert by_name(folder)["sweep/runs/lambda=0.5,seed=1"].reason.startswith("line 1")


def test_links_and_newer_formats_are_damage_and_foreign_directories_are_no_runs(folder, tmp_path):
    (folder / "finished" / "result.json").rename(tmp_path / "elsewhere")
    (folder / "finished" / "result.json").symlink_to(tmp_path / "elsewhere")
    record = folder / "failed" / "run.json"
    record.write_text(record.read_text().replace('"format_version": 2', '"format_version": 9'))
    (folder / "photos" / "checkpoints").mkdir(parents=True)
    (folder / "photos" / "spec.toml").write_text("seed = 0")
    (folder / "not-a-run").mkdir()
    (folder / "not-a-run" / "run.json").write_text("[]")
    listed = by_name(folder)
    assert listed["finished"].reason.startswith("expected a regular file, found a symbolic link")
    assert listed["failed"].reason.startswith("written by a newer version (format 9")
    assert listed["not-a-run"].reason.startswith("not a JSON object")
    assert "photos" not in listed


def test_a_linked_run_is_listed_but_links_are_not_walked(folder, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "run").symlink_to(folder / "finished")
    (tmp_path / "linked" / "all").symlink_to(folder)
    (tmp_path / "linked" / "self").symlink_to(tmp_path / "linked")
    assert {run.name for run in ek.list_runs(tmp_path / "linked")} == {"run"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_listed(folder):
    (folder / "sweep").chmod(0)
    try:
        assert by_name(folder)["sweep"].reason.startswith("cannot read")
    finally:
        (folder / "sweep").chmod(0o755)


def test_plugins_of_a_run_need_not_be_installed(tmp_path):
    spec = small_spec(method="soft_min", training={"epochs": 1})
    ek.train(spec, tmp_path / "run", progress=False, plugins=[TOY_PLUGINS])
    with pytest.raises(PluginError):
        ek.open_run(tmp_path / "run")
    (listed,) = ek.list_runs(tmp_path)
    assert (listed.method, listed.status) == ("soft_min", "finished")


def test_runs_of_regression_of_groups_of_several_methods_and_of_0_1_0(tmp_path):
    groups = [{"members": 1, "model": {"name": "mlp", "hidden": [3]}}, {"members": 2, "model": {"name": "mlp"}}]
    methods = [{"name": "bagging"}, {"name": "gncl"}]
    spec = {
        "data": "diabetes",
        "training": {"epochs": 1},
        "ensemble": {"groups": groups},
        "method": methods,
        "model": "mlp",
    }
    run = ek.train(spec, tmp_path / "values", progress=False)
    shutil.copytree(GOLDEN, tmp_path / "golden")
    listed = by_name(tmp_path)
    assert (listed["values"].method, listed["values"].model, listed["values"].members) == ("bagging + gncl", "mlp", 3)
    assert (listed["values"].mse, listed["values"].accuracy) == (run.metrics["test_mse"], None)
    assert listed["golden/finished"].status_text == "finished"
    assert listed["golden/interrupted"].status_text == "interrupted at epoch 2"
    assert listed["golden/finished"].loss == ek.open_run(GOLDEN / "finished").metrics["test_loss"]


def test_the_run_itself_can_be_named(folder):
    assert [run.name for run in ek.list_runs(folder / "finished")] == ["finished"]


def test_sorting_puts_runs_without_a_value_last(folder):
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text("")
    rising = [run.name for run in ek.list_runs(folder, sort="loss")]
    falling = [run.name for run in ek.list_runs(folder, sort="-loss")]
    losses = {run.name: run.loss for run in ek.list_runs(folder)}
    known = sorted((name for name in losses if losses[name] is not None), key=losses.__getitem__)
    assert rising[: len(known)] == known
    assert falling[: len(known)] == known[::-1]
    assert rising[len(known) :] == falling[len(known) :]
    assert "broken" in rising[len(known) :]
    assert [run.name for run in ek.list_runs(folder, sort="loss", reverse=True)] == falling
    assert [run.name for run in ek.list_runs(folder, sort="-loss", reverse=True)] == rising


def test_a_wrong_key_or_directory_is_refused_with_a_suggestion(folder):
    with pytest.raises(UsageError, match=r'(?s)cannot sort by "los".*did you mean "loss"'):
        ek.list_runs(folder, sort="-los")
    with pytest.raises(UsageError, match="no such directory"):
        ek.list_runs(folder / "nothing")
    with pytest.raises(UsageError, match="not a directory"):
        ek.list_runs(folder / "finished" / "run.json")


def test_the_command_prints_a_table_json_and_csv(folder):
    table = command("runs", str(folder), "--sort", "name").stdout.splitlines()
    assert table[0].split()[:6] == ["run", "status", "method", "model", "members", "data"]
    assert [line.split()[0] for line in table[1:]] == ["failed", "finished", "sweep/runs/lambda=0.5,seed=1"]
    assert "interrupted at epoch 2" in table[3]
    as_json = json.loads(command("runs", str(folder), "--sort", "-accuracy", "--json").stdout)
    assert [run["name"] for run in as_json] == [run.name for run in ek.list_runs(folder, "-accuracy")]
    assert as_json[0]["path"] == str(folder / as_json[0]["name"])
    rows = list(csv.DictReader(io.StringIO(command("runs", str(folder), "--csv", "--reverse").stdout)))
    assert [row["name"] for row in rows] == [run.name for run in ek.list_runs(folder, reverse=True)]
    assert {row["status"] for row in rows} == {"finished", "failed", "interrupted"}
    assert float(next(row for row in rows if row["name"] == "finished")["loss"]) > 0


def test_the_command_without_runs_and_with_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("runs").stdout == "no runs in runs; start one with: ensemblekit train digits\n"
    assert json.loads(command("runs", "--json").stdout) == []
    missing = command("runs", "nothing")
    assert (missing.exit_code, last_error(missing)[:24]) == (2, "error: no such directory")
    assert command("runs", ".", "--json", "--csv").exit_code == 2
    assert command("runs", ".", "--sort", "acuracy").exit_code == 2


def test_the_command_lists_damaged_runs_and_succeeds(folder):
    (folder / "finished" / "run.json").write_text("\x1b[31m")
    result = command("runs", str(folder))
    assert result.exit_code == 0
    assert "damaged: damaged" not in result.stdout
    assert "\x1b" not in result.stdout


def test_names_cannot_control_the_terminal(folder):
    (folder / "finished").rename(folder / "a\x1b]0;title\x07\nb")
    output = command("runs", str(folder)).stdout
    assert "\x1b" not in output
    assert len(output.splitlines()) == 4


def test_listing_imports_neither_torch_nor_pydantic(folder):
    code = "import sys\nfrom ensemblekit.cli import main\ntry:\n main()\nfinally:\n"
    code += " sys.stderr.write(str([name for name in ('torch', 'pydantic', 'numpy') if name in sys.modules]))"
    command_line = [sys.executable, "-c", code, "runs", str(folder), "--json"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 3
    assert done.stderr == "[]"
