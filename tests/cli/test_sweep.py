"""The command sweep: options, dry run, commands, exit codes, displays, and kills at any moment."""

from __future__ import annotations

import csv
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from helpers.commands import last_error, run
from helpers.forked_commands import ForkedCommand
from helpers.places import ROOT, TOY_PLUGINS
from helpers.sweeps import BASE, EXPLODING, final_metrics, rows, statuses

import ensemblekit as ek
from ensemblekit.analysis.sweep_rows import SweepRun
from ensemblekit.display.sweep_table import LiveSweep, PlainSweep

GRID = ("--grid", "method.lambda=0:1:0.5")
PLUGIN = ("--plugin", str(TOY_PLUGINS))


@pytest.fixture
def spec(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(tomli_w.dumps(BASE))
    return "toy.toml"


def test_a_sweep_prints_plain_lines_and_a_table_on_a_pipe(spec):
    result = run("sweep", spec, *GRID, "--seeds", "2", *PLUGIN)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "sweep sweeps/toy-1: 6 runs, 0 of them ended before"
    assert "lambda=0,seed=0: started" in lines
    assert any(line.startswith("lambda=1,seed=1: finished, validation loss") for line in lines)
    assert any("6 of 6 runs ended; best so far lambda=" in line for line in lines)
    assert "left" in result.stdout
    assert lines[-1] == "the sweep is in sweeps/toy-1; results.csv has all metrics"
    assert "\x1b" not in result.stdout


def test_quiet_prints_the_path_and_json_the_table(spec):
    assert run("sweep", spec, *GRID, *PLUGIN, "--quiet", "--out", "s").stdout == "s\n"
    printed = json.loads(run("sweep", "s", *PLUGIN, "--json").stdout)
    assert printed["path"] == "s"
    assert [row["method.lambda"] for row in printed["runs"]] == [0.0, 0.5, 1.0]
    assert printed["runs"][0]["test_accuracy"] is not None


def test_a_dry_run_prints_every_run_with_an_estimate_and_writes_nothing(spec):
    before = set(Path().rglob("*"))
    result = run("sweep", spec, *GRID, "--grid", "model.bias=true,false", *PLUGIN, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "lambda=0.5,bias=false,seed=0  planned  2" in result.stdout
    assert "6 of 6 runs are left, about 0:00:" in result.stdout
    assert "an estimate from measured steps of 2 kinds of run" in result.stdout
    assert set(Path().rglob("*")) == before
    run("sweep", spec, *GRID, *PLUGIN, "--out", "s", "--quiet")
    printed = json.loads(run("sweep", "s", "--seeds", "2", *PLUGIN, "--dry-run", "--json").stdout)
    assert [row["status"] for row in printed["runs"]] == ["finished"] * 3 + ["planned"] * 3
    assert printed["estimated_seconds"] > 0


def test_commands_are_one_quoted_line_per_run_and_the_sweep_collects_them(spec):
    variants = '[{name="a b", set={"method.lambda"=0.25}}, {name="bag", set={method={name="bagging"}}}]'
    result = run("sweep", spec, "--set", f"sweep.variants={variants}", *PLUGIN, "--commands", "--out", "s p")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert "ensemblekit sweep 's p'" in result.stderr
    for line in lines:
        arguments = shlex.split(line)
        assert arguments[:2] == ["ensemblekit", "train"]
        assert run(*arguments[1:], "--quiet").exit_code == 0
    assert statuses(Path("s p")) == ["planned", "planned"]
    modified = [path.stat().st_mtime_ns for path in Path("s p").glob("runs/*/result.json")]
    assert run("sweep", "s p", *PLUGIN, "--quiet").exit_code == 0
    assert [path.stat().st_mtime_ns for path in Path("s p").glob("runs/*/result.json")] == modified
    assert statuses(Path("s p")) == ["finished", "finished"]
    assert rows(Path("s p"))[1]["method"] == '{name = "bagging"}'
    assert run("sweep", "s p", *PLUGIN, "--commands").stdout == ""


def test_a_failed_run_is_exit_code_1_and_says_how_to_retry(spec):
    Path("exploding.py").write_text(EXPLODING)
    plugins = (*PLUGIN, "--plugin", "exploding.py")
    result = run(
        "sweep", spec, "--set", "method=exploding", "--grid", "method.fails=true,false", *plugins, "--out", "s"
    )
    assert result.exit_code == 1
    assert "1 of 2 runs failed or are damaged, the first: fails=true,seed=0" in last_error(result)
    assert last_error(result).endswith(f"ensemblekit sweep s {' '.join(plugins)} --retry-failed")
    assert "fails=false,seed=0: finished" in result.stdout
    assert statuses(Path("s")) == ["failed", "finished"]


@pytest.mark.parametrize(
    ("options", "exit_code", "part"),
    [
        (("--grid", "method.lamda=0,1"), 2, 'did you mean "lambda"?'),
        (("--grid", "method.lambda="), 2, "empty"),
        (("--grid", "method.lambda=0", "--grid", "method.lambda=1"), 2, "given twice"),
        (("--grid", "method.lambda=0,7"), 2, "lambda=7"),
        (("--grid", "seed=1,2"), 2, "cannot vary here"),
        (("--seeds", "0"), 2, "--seeds"),
        (("--jobs", "0"), 2, "--jobs"),
        (("--trials", "3"), 2, "there is no --search"),
        (("--search", "method.lambda=0..1", "--minimise", "test_loss"), 2, "never at test data"),
        (("--search", "method.lambda=0..1", "--grid", "model.bias=true"), 2, "no grid"),
        (("--search", "method.lambda=0..1", "--commands"), 2, "no commands"),
        (("--out", "full"), 5, "not empty"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(spec, options, exit_code, part):
    Path("full").mkdir()
    Path("full", "x").touch()
    before = set(Path().rglob("*"))
    result = run("sweep", spec, *PLUGIN, *options)
    assert result.exit_code == exit_code, result.output
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert set(Path().rglob("*")) == before


def test_another_spec_in_the_directory_is_refused(spec):
    run("sweep", spec, *GRID, *PLUGIN, "--out", "s", "--quiet")
    result = run("sweep", spec, *GRID, *PLUGIN, "--out", "s", "--set", "training.epochs=3")
    assert result.exit_code == 5
    assert "training.epochs: 2 → 3" in last_error(result)


def test_validate_checks_every_combination_of_the_section(spec):
    section = 'sweep={grid={"method.lambda"=[0, 1]}, seeds=2}'
    result = run("validate", spec, *PLUGIN, "--set", section)
    assert "2 × method.lambda, 2 seeds: for ensemblekit sweep; train ignores it" in result.stdout
    assert "4, all valid" in result.stdout
    wrong = run("validate", spec, *PLUGIN, "--set", 'sweep={grid={"method.lambda"=[0, 2]}}', "--json")
    assert wrong.exit_code == 2
    assert "(in lambda=2,seed=0)" in json.loads(wrong.stdout)["problems"][0]["what"]


def test_a_search_is_run_and_extended(spec):
    result = run("sweep", spec, "--search", "method.lambda=0..1", "--trials", "2", *PLUGIN, "--out", "s")
    assert result.exit_code == 0, result.stderr
    assert "lowest validation loss: trial=" in result.stdout
    assert run("sweep", "s", "--trials", "3", *PLUGIN, "--quiet").exit_code == 0
    assert [row["name"] for row in rows(Path("s"))] == ["trial=0", "trial=1", "trial=2"]


def test_the_help_needs_no_torch():
    code = (
        "import sys, ensemblekit.cli\n"
        "try: ensemblekit.cli.main(['sweep', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'pydantic', 'rich', 'optuna', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def follow(display) -> None:
    """Show a sweep of three runs, the last of which fails."""

    def of(name, status, **facts):
        return SweepRun(name, Path(name), {}, "", 0, status, **facts)

    display.sweep_started(Path("s"), [of(name, "planned") for name in "abc"], dict.fromkeys("abc", 2))
    for name in "ab":
        display.run_started(name)
        for epoch in (1, 2):
            display.epoch_started(name, epoch, 2)
            display.epoch_finished(name, epoch, 2, {"validation_loss": 0.5, "test_accuracy": 0.9})
        metrics = {"validation_loss": 0.25 if name == "b" else 0.5, "test_accuracy": 0.9}
        display.run_ended(of(name, "finished", seconds=1.0, metrics=metrics))
    display.notice("a word")
    display.run_started("c")
    display.epoch_started("c", 1, 2)


def test_the_live_table_shows_progress_the_best_and_the_time_left(monkeypatch):
    display = LiveSweep()
    monkeypatch.setattr(display.live, "start", lambda: None)
    follow(display)
    with display.printer.console.capture() as captured:
        display.printer.console.print(display._picture())
    text = captured.get()
    assert "epoch 1/2" in text
    assert "best so far b, validation loss 0.250" in text
    assert "2 of 3 runs ended" in text
    assert "left" in text
    display.run_ended(SweepRun("c", Path("c"), {}, "", 0, "failed", "[red]x[/red]"))
    with display.printer.console.capture() as captured:
        display.printer.console.print(display._picture())
    assert "failed: [red]x[/red]" in captured.get()  # text of others is never markup
    display.close()
    display.close()


def test_the_plain_lines_name_failures(capsys):
    display = PlainSweep()
    follow(display)
    display.run_ended(SweepRun("c", Path("c"), {}, "", 0, "failed", "disk full"))
    out = capsys.readouterr().out
    assert "c: failed: disk full\n  3 of 3 runs ended (1 failed); best so far b" in out
    assert "note: a word" in out


def test_a_reader_that_is_gone_does_not_stop_a_sweep(tmp_path, monkeypatch):
    display = PlainSweep()

    def broken(text=""):
        raise BrokenPipeError

    monkeypatch.setattr(display.printer, "text", broken)
    follow(display)


def arguments(out: Path, *options: str) -> list[str]:
    changes = (
        "engine.name=sequential",
        "training.epochs=6",
        "training.batch_size=16",
        "ensemble.members=3",
        "data.limit_train=600",
    )
    settings = [part for change in changes for part in ("--set", change)]
    return ["sweep", str(ROOT / "specs" / "digits.toml"), *GRID, *settings, "--out", str(out), *options]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sweep that nobody disturbed."""
    out = tmp_path_factory.mktemp("sweeps") / "whole"
    assert run(*arguments(out), "--quiet").exit_code == 0
    return out


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_that_is_killed_at_any_moment_continues_to_the_same_results(tmp_path, whole, jobs):
    out = tmp_path / "s"
    moments = random.Random(int(jobs))
    finished: dict[str, int] = {}
    for _ in range(2):
        process = ForkedCommand(arguments(out, "--jobs", jobs), tmp_path)
        while process.is_running and "started\n" not in process.stdout:  # wait until training has begun
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 1))  # three runs take about as long
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for_workers(out)
        for path, modified in finished.items():
            assert Path(path).stat().st_mtime_ns == modified  # finished runs are untouched
        finished = {str(path): path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
        ek.open_sweep(out)
    assert run(*arguments(out, "--jobs", jobs), "--quiet").exit_code == 0
    assert final_metrics(out) == final_metrics(whole)


def wait_for_workers(out: Path) -> None:
    """Wait until the processes of a killed sweep have saved and ended."""
    from ensemblekit.runs.locking import is_locked

    deadline = time.monotonic() + 30
    while any(is_locked(path) for path in out.glob("runs/*/.lock")):
        assert time.monotonic() < deadline, "a process goes on although its sweep was killed"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_saves_and_says_how_to_continue(tmp_path, jobs):
    out = tmp_path / "s"
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemblekit", *arguments(out, "--jobs", jobs, "--set", "training.epochs=5000")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "0 of 3 runs are finished" in errors
    assert errors.strip().splitlines()[-1].endswith(f"continue with: ensemblekit sweep {out}")
    with (out / "results.csv").open(newline="") as file:
        assert "interrupted" in {row["status"] for row in csv.DictReader(file)}
    assert not any(os.path.exists(path) and path.read_text().strip() for path in out.glob("runs/*/.lock"))
