"""Sweep directories: results, continuing, extending, failures, damage, locks and processes."""

from __future__ import annotations

import os
import shutil
import tomllib
from contextlib import ExitStack

import numpy as np
import pytest
from helpers.sweeps import BASE, EXPLODING, PLUGINS, final_metrics, rows, statuses, sweep

import ensemblekit as ek
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_jobs import core_shares
from ensemblekit.analysis.sweeps import SweepDirectory
from ensemblekit.core.errors import Interrupted, RunError, UsageError
from ensemblekit.runs.locking import locked

GRID = {"method.lambda": [0, 0.5]}


class StopIn(SweepListener):
    """Interrupts a run when its second epoch begins."""

    def __init__(self, name: str) -> None:
        self.name = name

    def epoch_started(self, name, epoch, num_epochs):
        if (name, epoch) == (self.name, 2):
            raise KeyboardInterrupt


class Recorder(SweepListener):
    """Remembers what happens, and may interrupt."""

    def __init__(self, interrupt_in: str = "") -> None:
        self.interrupt_in = interrupt_in
        self.started: list[str] = []
        self.notes: list[str] = []

    def notice(self, text):
        self.notes.append(text)

    def run_started(self, name):
        self.started.append(name)
        if name == self.interrupt_in:
            raise KeyboardInterrupt


def test_a_sweep_is_a_directory_of_ordinary_runs_and_a_tidy_table(tmp_path):
    found = sweep(tmp_path / "s", grid=GRID, seeds=2)
    names = ["lambda=0,seed=0", "lambda=0.5,seed=0", "lambda=0,seed=1", "lambda=0.5,seed=1"]
    assert [run.name for run in found.runs] == names
    table = found.table()
    assert [(row["method.lambda"], row["seed"], row["status"]) for row in table] == [
        (0, 0, "finished"),
        (0.5, 0, "finished"),
        (0, 1, "finished"),
        (0.5, 1, "finished"),
    ]
    assert rows(tmp_path / "s")[1]["method.lambda"] == "0.5"
    assert rows(tmp_path / "s")[1]["path"] == "runs/lambda=0.5,seed=0"
    assert (tmp_path / "s" / "results.csv").read_bytes().count(b"\r\n") == 5  # RFC 4180
    for run, row in zip(found.runs, table, strict=True):
        opened = ek.open_run(run.path, plugins=PLUGINS)
        assert (opened.spec.methods[0].lam, opened.spec.seed) == (run.overrides["method.lambda"], run.seed)
        assert row["test_accuracy"] == opened.metrics["test_accuracy"]
        assert row["validation_loss"] == opened.history[-1]["validation_loss"]
        assert row["train_loss"] == opened.history[-1]["train_loss"]
    again = ek.open_sweep(tmp_path / "s")
    assert again.table() == table
    assert "4 of 4 runs finished" in repr(again)


def test_a_run_of_a_sweep_equals_a_run_by_itself(tmp_path):
    found = sweep(tmp_path / "s", grid=GRID)
    spec = ek.load_spec(BASE, {"method.lambda": 0.5}, PLUGINS)
    alone = ek.train(spec, tmp_path / "alone", progress=False, plugins=PLUGINS)
    assert ek.open_run(found.runs[1].path, plugins=PLUGINS).metrics == alone.metrics


def test_validation_metrics_are_those_of_the_epoch_whose_weights_are_kept(tmp_path):
    spec = {
        **BASE,
        "training": {**BASE["training"], "epochs": 6, "keep": "best", "optimizer": {"name": "sgd", "lr": 3}},
    }
    (run,) = sweep(tmp_path / "s", spec).runs
    losses = [row["validation_loss"] for row in ek.open_run(run.path, plugins=PLUGINS).history]
    assert run.metrics["validation_loss"] == min(losses)


def test_called_again_finished_runs_are_kept_and_the_directory_is_enough(tmp_path):
    sweep(tmp_path / "s", grid=GRID)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").rglob("*") if path.is_file()}
    recorder = Recorder()
    sweep(tmp_path / "s", grid=GRID, progress=recorder)
    ek.sweep(tmp_path / "s", progress=recorder, plugins=PLUGINS)
    assert recorder.started == []
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_sweep_may_be_extended_by_seeds_values_and_variants(tmp_path):
    sweep(tmp_path / "s", grid=GRID)
    recorder = Recorder()
    sweep(tmp_path / "s", grid={"method.lambda": np.linspace(0, 1, 3)}, seeds=2, progress=recorder)
    assert recorder.started == ["lambda=1,seed=0", "lambda=0,seed=1", "lambda=0.5,seed=1", "lambda=1,seed=1"]
    assert len(rows(tmp_path / "s")) == 6


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"overrides": {"training.epochs": 3}}, "training.epochs: 2 → 3"),
        ({"grid": {"method.lambda": [0.5, 1]}}, "lambda=0,seed=0 would not be in this one"),
        ({"grid": {"model.bias": [True]}}, "another grid: lambda=0,seed=0 and 1 more"),
    ],
)
def test_a_directory_of_another_sweep_is_refused_with_what_differs(tmp_path, options, part):
    sweep(tmp_path / "s", grid=GRID)
    before = (tmp_path / "s" / "sweep.toml").read_text()
    with pytest.raises(RunError, match="the directory has a sweep of another") as error:
        sweep(tmp_path / "s", **{"grid": GRID, **options})
    assert part in error.value.what
    assert (tmp_path / "s" / "sweep.toml").read_text() == before


def test_foreign_directories_files_and_damaged_sweeps_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, part in (("full", "not empty"), ("file", "not a directory")):
        with pytest.raises(RunError, match=part):
            sweep(tmp_path / name, grid=GRID)
    with pytest.raises(RunError, match="not a sweep directory"):
        ek.open_sweep(tmp_path / "full")
    with pytest.raises(RunError, match="a directory without a sweep"):
        ek.sweep(tmp_path / "full", progress=False)
    sweep(tmp_path / "s", grid=GRID)
    file = tmp_path / "s" / "sweep.toml"
    content = file.read_text()
    file.write_text(content.replace("epochs = 2", "epochs = 3"))
    with pytest.raises(RunError, match="differs from what was written"):
        ek.open_sweep(tmp_path / "s")
    file.write_text("format_version = 99\n")
    with pytest.raises(RunError, match="newer version"):
        ek.open_sweep(tmp_path / "s")
    file.write_text("= 3")
    with pytest.raises(RunError, match="not TOML"):
        sweep(tmp_path / "s", grid=GRID)


def test_a_sweep_file_cannot_name_directories_elsewhere(tmp_path):
    import tomli_w

    from ensemblekit.analysis.sweeps import _sha256

    sweep(tmp_path / "s", grid=GRID)
    file = tmp_path / "s" / "sweep.toml"
    record = tomllib.loads(file.read_text())
    del record["sha256"]
    for name in ("../../elsewhere", "..", "/etc"):
        record["runs"][0]["name"] = name
        text = tomli_w.dumps(record)
        file.write_text(f'sha256 = "{_sha256(text)}"\n{text}')
        with pytest.raises(RunError, match="not the name of a run"):
            ek.open_sweep(tmp_path / "s")


def test_without_a_directory_each_sweep_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [str(sweep(None, name="demo").path) for _ in range(2)]
    assert paths == ["sweeps/demo-1", "sweeps/demo-2"]


def test_an_invalid_combination_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ek.EnsemblekitError, match="lamda"):
        sweep(None, grid={"method.lamda": [0, 1]})
    with pytest.raises(UsageError, match="jobs"):
        sweep(None, grid=GRID, jobs=0)
    with pytest.raises(UsageError, match='"threaded" needs two cores'):
        sweep(None, spec={**BASE, "engine": {"name": "threaded"}}, grid=GRID, jobs=sum(map(len, core_shares(1))) + 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_run_is_listed_with_its_error_and_the_others_go_on(tmp_path, jobs):
    (tmp_path / "exploding.py").write_text(EXPLODING)
    options = {
        "spec": {**BASE, "method": "exploding"},
        "grid": {"method.fails": [False, True, False], "model.bias": [True, False]},
        "plugins": [*PLUGINS, str(tmp_path / "exploding.py")],
    }
    found = sweep(tmp_path / "s", jobs=jobs, **options)
    assert [run.status for run in found.runs] == ["finished", "finished", "failed", "failed"]
    assert "not finite" in found.runs[2].error
    assert "\n" not in rows(tmp_path / "s")[2]["error"]
    assert found.runs[2].metrics == {}
    recorder = Recorder()
    sweep(tmp_path / "s", progress=recorder, **options)
    assert recorder.started == []
    sweep(tmp_path / "s", progress=recorder, retry_failed=True, **options)
    assert recorder.started == ["fails=true,bias=true,seed=0", "fails=true,bias=false,seed=0"]
    assert statuses(tmp_path / "s") == ["finished", "finished", "failed", "failed"]


def test_a_run_that_fails_before_it_has_a_directory_is_remembered_and_can_be_retried(tmp_path):
    table = tmp_path / "data.csv"
    spec = {**BASE, "data": {"name": "table", "path": str(table), "target": "y"}, "training": {"epochs": 1}}
    grid = {"ensemble.members": [1, 2]}
    found = sweep(tmp_path / "s", spec, grid=grid)
    assert [run.status for run in found.runs] == ["failed", "failed"]
    assert "data.csv" in found.runs[0].error
    assert [run.status for run in ek.open_sweep(tmp_path / "s").runs] == ["failed", "failed"]
    table.write_text("a,b,y\n" + "".join(f"{i % 3},{i % 5},{'uv'[i % 2]}\n" for i in range(40)))
    assert [run.status for run in sweep(tmp_path / "s", spec, grid=grid).runs] == ["failed", "failed"]
    again = sweep(tmp_path / "s", spec, grid=grid, retry_failed=True)
    assert [(run.status, run.error) for run in again.runs] == [("finished", ""), ("finished", "")]


def test_damaged_runs_are_listed_and_stop_nothing(tmp_path):
    out = tmp_path / "s"
    sweep(out, grid={"method.lambda": [0, 0.25, 0.5, 0.75]})
    runs = out / "runs"
    (runs / "lambda=0,seed=0" / "run.json").write_text("{")
    shutil.rmtree(runs / "lambda=0.25,seed=0")
    shutil.copytree(runs / "lambda=0.5,seed=0", runs / "lambda=0.25,seed=0")
    (runs / "lambda=0.5,seed=0" / "metrics.jsonl").write_text("nonsense\n")
    shutil.rmtree(runs / "lambda=0.75,seed=0")
    found = sweep(out, grid={"method.lambda": [0, 0.25, 0.5, 0.75]})
    assert [run.status for run in found.runs] == ["damaged", "damaged", "damaged", "finished"]
    assert "run.json" in found.runs[0].error
    assert "its spec is not the planned one: method.lambda: 0.25 → 0.5" in found.runs[1].error
    assert "metrics.jsonl" in found.runs[2].error


def test_ctrl_c_says_how_to_continue_and_the_next_call_finishes(tmp_path):
    whole = tmp_path / "whole"
    sweep(whole, grid=GRID, seeds=2)
    out = tmp_path / "s"
    with pytest.raises(Interrupted) as error:
        sweep(out, grid=GRID, seeds=2, progress=Recorder(interrupt_in="lambda=0.5,seed=0"))
    assert error.value.exit_code == 130
    assert error.value.what == "1 of 4 runs are finished"
    assert error.value.fix.startswith(f"continue with: ensemblekit sweep {out}")
    assert statuses(out) == ["finished", "planned", "planned", "planned"]
    sweep(out, grid=GRID, seeds=2)
    assert final_metrics(out) == final_metrics(whole)


def test_what_a_killed_process_left_before_its_first_checkpoint_is_started_anew(tmp_path):
    sweep(tmp_path / "whole", grid=GRID)
    out = tmp_path / "s"
    with pytest.raises(Interrupted):
        sweep(out, grid=GRID, progress=StopIn("lambda=0,seed=0"))
    first, second = (out / "runs" / name for name in ("lambda=0,seed=0", "lambda=0.5,seed=0"))
    shutil.rmtree(first / "checkpoints")  # killed before the first checkpoint
    (first / "checkpoints").mkdir()
    second.mkdir()  # killed while the run was begun
    (second / "spec.toml").write_text("incomplete")
    (second / ".writing-x").mkdir()
    sweep(out, grid=GRID)
    assert final_metrics(out) == final_metrics(tmp_path / "whole")


def test_an_unfinished_run_is_resumed_from_its_checkpoint(tmp_path):
    sweep(tmp_path / "whole", grid=GRID)
    out = tmp_path / "s"
    with pytest.raises(Interrupted):
        sweep(out, grid=GRID, progress=StopIn("lambda=0,seed=0"))
    run = ek.open_sweep(out).runs[0]
    assert (run.status, run.epochs) == ("interrupted", 1)
    started = (run.path / "spec.toml").stat().st_mtime_ns
    sweep(out, grid=GRID)
    assert (run.path / "spec.toml").stat().st_mtime_ns == started
    assert final_metrics(out) == final_metrics(tmp_path / "whole")


def test_two_sweeps_do_not_run_in_one_directory(tmp_path):
    sweep(tmp_path / "s", grid=GRID)
    with locked(tmp_path / "s" / ".lock"), pytest.raises(RunError, match=f"in use by pid {os.getpid()}"):
        sweep(tmp_path / "s", grid=GRID)


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path):
    out = tmp_path / "s"
    with pytest.raises(Interrupted):
        sweep(out, grid=GRID, progress=StopIn("lambda=0,seed=0"))
    begun = out / "runs" / "lambda=0.5,seed=0"
    begun.mkdir()
    with locked(out / "runs" / "lambda=0,seed=0" / ".lock"), locked(begun / ".lock"):
        found = sweep(out, grid=GRID)
        assert [run.status for run in found.runs] == ["running", "running"]

        class JustNow(SweepListener):
            def run_started(self, name):
                stack.enter_context(locked(out / "runs" / "lambda=1,seed=0" / ".lock"))

        with ExitStack() as stack:  # a process that is faster by a moment
            (out / "runs" / "lambda=1,seed=0").mkdir()
            found = sweep(out, grid={"method.lambda": [0, 0.5, 1]}, progress=JustNow())
        assert [run.status for run in found.runs] == ["running"] * 3
    found = sweep(out, grid={"method.lambda": [0, 0.5, 1]})
    assert [run.status for run in found.runs] == ["finished"] * 3


def test_several_processes_give_the_same_results_and_show_their_progress(tmp_path):
    class Epochs(SweepListener):
        def __init__(self):
            self.seen = []

        def epoch_finished(self, name, epoch, num_epochs, metrics):
            self.seen.append((name, epoch, metrics["validation_loss"]))

    epochs = Epochs()
    sweep(tmp_path / "one", grid=GRID, seeds=2)
    sweep(tmp_path / "two", grid=GRID, seeds=2, jobs=2, progress=epochs)
    assert final_metrics(tmp_path / "one") == final_metrics(tmp_path / "two")
    assert len(epochs.seen) == 8


def test_cores_are_shared_out_completely():
    cores = sorted(os.sched_getaffinity(0))
    for jobs in (1, len(cores), 3 * len(cores)):
        shares = core_shares(jobs)
        assert len(shares) == jobs
        assert {core for share in shares for core in share} == set(cores)


def test_the_section_of_a_spec_is_a_whole_comparison(tmp_path):
    variants = [
        {"name": "gncl"},
        {"name": "bagging", "set": {"method": "bagging"}},
        {"name": "single", "set": {"method": [], "ensemble.members": 1}},
    ]
    spec = {**BASE, "sweep": {"grid": {"method.lambda": "0:1:0.5"}, "seeds": 2, "variants": variants}}
    found = sweep(tmp_path / "s", spec)
    assert len(found.runs) == 2 * (3 + 1 + 1)
    by_variant = {row["variant"]: row for row in found.table()}
    assert by_variant["bagging"]["method"] == "bagging"
    assert by_variant["bagging"]["method.lambda"] is None
    assert rows(tmp_path / "s")[3]["method.lambda"] == ""
    record = SweepDirectory.open(tmp_path / "s").record
    assert record["sweep"]["seeds"] == 2
    assert "sweep" not in record["spec"]


def test_train_ignores_the_section_and_says_so(tmp_path, capsys):
    spec = {**BASE, "sweep": {"grid": {"method.lambda": [0, 1]}}}
    run = ek.train(spec, tmp_path / "run", plugins=PLUGINS)
    assert "2 × method.lambda: for ensemblekit sweep; train ignores it" in capsys.readouterr().out
    assert run.spec.methods[0].lam == 0.5


def test_values_that_toml_cannot_hold_are_refused(tmp_path):
    for options in ({"grid": {"method.lambda": [None]}}, {"overrides": {"data.spread": object()}}):
        with pytest.raises(ek.EnsemblekitError):
            sweep(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()
