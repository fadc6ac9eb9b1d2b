"""The commands train, resume, evaluate and predict; what they call is stood in for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.commands import last_error, run
from helpers.fake_runs import CLASSIFIER, METRICS, FakeRun, linear_ensemble
from helpers.places import ROOT, TOY_PLUGINS

import ensemblekit as ek
from ensemblekit import api
from ensemblekit.core.errors import DataError, Interrupted
from ensemblekit.core.hooks import RunHooks
from ensemblekit.display.progress import PlainProgress, Progress

SPEC = str(ROOT / "specs" / "digits.toml")


class Calls:
    """Stands in for the functions of the Python interface, and remembers how they were called."""

    def __init__(self) -> None:
        self.made: list[tuple] = []
        self.closed = 0
        self.error: Exception | None = None

    def train(self, spec, out=None, progress=True, data=None, plugins=(), name="run") -> FakeRun:
        out = Path(out or f"runs/{name}-1")
        self.made.append(("train", spec, out, progress))
        return self._run(progress, out)

    def resume(self, path, progress=True, plugins=()) -> FakeRun:
        self.made.append(("resume", path, tuple(plugins), progress))
        return self._run(progress, Path(path))

    def evaluate_run(self, path, data=None, plugins=()) -> dict[str, float]:
        self.made.append(("evaluate", path, data, tuple(plugins)))
        return dict(METRICS)

    def load(self, path, plugins=()) -> ek.Ensemble:
        self.made.append(("load", path, tuple(plugins)))
        weights = torch.tensor([[[1.0, 0], [0, 1]]])
        info = ek.DataInfo("classification", (2,), 2)
        return linear_ensemble(ek.load_spec(CLASSIFIER), weights, info, ("ant", "bee"))

    def _run(self, progress: Progress, path: Path) -> FakeRun:
        finished = FakeRun(path=path)
        hooks = RunHooks([], [progress]).call
        hooks.run_started(spec=finished.spec, path=path, plan=[("data", "digits")])
        close = progress.close
        progress.close = lambda: (close(), setattr(self, "closed", self.closed + 1))
        if self.error:
            raise self.error
        results = {"metrics": finished.metrics, "members": finished.members, "seconds": finished.seconds}
        hooks.run_ended(status="finished", error=None, **results)
        return finished


@pytest.fixture(autouse=True)
def calls(monkeypatch, tmp_path) -> Calls:
    calls = Calls()
    for name in ("train", "resume", "evaluate_run", "load"):
        monkeypatch.setattr(api, name, getattr(calls, name), raising=False)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def table(tmp_path) -> str:
    (tmp_path / "rows.csv").write_text("a,b\n2,1\n0,1\n")
    return "rows.csv"


def test_train_shows_the_plan_and_the_summary(calls):
    result = run("train", SPEC)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("plan\n")
    assert "the run is in runs/digits-1" in result.stdout
    ((_, spec, out, progress),) = calls.made
    assert (spec, out, type(progress)) == (ek.load_spec(SPEC), Path("runs/digits-1"), PlainProgress)
    assert calls.closed == 2  # by the end of the run and by the command


def test_train_takes_settings_a_device_a_place_and_plugin_files(calls, tmp_path):
    spec = tmp_path / "toy.toml"
    spec.write_text('[data]\nname = "blobs"\n[model]\nname = "linear"\n')
    options = ("--set", "training.epochs=3", "--device", "cpu", "--out", "elsewhere", "--plugin", str(TOY_PLUGINS))
    result = run("train", str(spec), *options)
    assert result.exit_code == 0, result.stderr
    ((_, seen, out, _),) = calls.made
    assert (seen.training.epochs, seen.engine.device, out) == (3, "cpu", Path("elsewhere"))


@pytest.mark.parametrize(
    ("directory", "has_run", "name"),
    [("digits-1", True, "digits"), ("my-run", True, "my-run"), ("2024-12", True, "2024"), ("digits-1", False, "spec")],
)
def test_a_run_of_the_spec_of_another_run_keeps_its_name(calls, tmp_path, directory, has_run, name):
    folder = tmp_path / "elsewhere" / directory
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(Path(SPEC).read_text())
    if has_run:
        (folder / "run.json").write_text("{}")
    assert run("train", str(folder / "spec.toml"), "--quiet").stdout == f"runs/{name}-1\n"


def test_quiet_prints_only_where_the_run_is(calls):
    assert run("train", SPEC, "--quiet").stdout == "runs/digits-1\n"
    assert run("resume", "runs/x", "--quiet").stdout == "runs/x\n"
    assert {type(made[3]) for made in calls.made} == {Progress}


def test_json_is_the_final_metrics_and_the_place_and_nothing_else():
    assert json.loads(run("train", SPEC, "--json").stdout) == METRICS | {"path": "runs/digits-1"}
    assert json.loads(run("resume", "runs/x", "--json").stdout) == METRICS | {"path": "runs/x"}


def test_a_wrong_spec_trains_nothing(calls):
    result = run("train", SPEC, "--set", "method.lamda=1", "--device", "tpu")
    assert result.exit_code == 2
    assert 'method.lamda: unknown key; --set method.lamda=1; did you mean "lambda"?' in result.stderr
    assert "engine.device" in result.stderr
    assert calls.made == []


@pytest.mark.parametrize("exit_code", [130, 143])
def test_an_interrupt_says_what_is_saved_and_how_to_go_on(calls, exit_code):
    calls.error = Interrupted(
        "saved at epoch 3", "runs/x", "continue with: ensemblekit resume runs/x", exit_code=exit_code
    )
    result = run("train", SPEC)
    assert result.exit_code == exit_code
    assert last_error(result) == "error: saved at epoch 3; runs/x; continue with: ensemblekit resume runs/x"
    assert "Traceback" not in result.stderr
    assert calls.closed == 1


def test_an_interrupt_is_that_of_ctrl_c_if_nothing_else_is_said():
    assert Interrupted("saved at epoch 3").exit_code == 130
    assert Interrupted("saved at epoch 3", "runs/x").line == "saved at epoch 3; runs/x"


def test_resume_goes_on_with_its_plugin_files(calls):
    result = run("resume", "runs/x", "--plugin", "mine.py")
    assert result.exit_code == 0, result.stderr
    assert calls.made[0][:3] == ("resume", Path("runs/x"), ("mine.py",))
    assert "the run is in runs/x" in result.stdout


def test_evaluate_shows_every_metric(calls):
    result = run("evaluate", "runs/x", "--data", "other.csv", "--plugin", "mine.py")
    assert calls.made == [("evaluate", Path("runs/x"), "other.csv", ("mine.py",))]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["of", "metric", "value"]
    assert ["members", "mean_member_loss", "0.098"] in lines
    assert {line[1] for line in lines[1 : len(METRICS) + 1]} == set(METRICS)
    assert result.stdout.endswith("remainder 0.004\n")


def test_evaluate_as_json_is_one_flat_object():
    assert json.loads(run("evaluate", "runs/x", "--json").stdout) == METRICS


def test_predict_prints_csv(table):
    lines = run("predict", "runs/x", table).stdout.splitlines()
    assert lines[0] == "file,row,class,probability,agreement,entropy,mutual_information"
    assert [line.split(",")[:3] for line in lines[1:]] == [["rows.csv", "1", "ant"], ["rows.csv", "2", "bee"]]


@pytest.mark.parametrize("option", [("--format", "json"), ("--json",)])
def test_predict_prints_json(table, option):
    assert [answer["class"] for answer in json.loads(run("predict", "runs/x", table, *option).stdout)] == ["ant", "bee"]


@pytest.mark.parametrize(("name", "first"), [("out.csv", "file,row"), ("out.json", "[\n"), ("out.txt", "file,row")])
def test_predict_writes_a_file_in_the_format_of_its_name(table, name, first, tmp_path):
    result = run("predict", "runs/x", table, "--output", name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / name).read_text().startswith(first)


def test_a_bad_file_writes_nothing(table, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,oops\n")
    result = run("predict", "runs/x", table, "bad.csv", "--output", "out.csv")
    assert result.exit_code == DataError.exit_code
    assert "bad.csv, row 1" in last_error(result)
    assert not (tmp_path / "out.csv").exists()
    printed = run("predict", "runs/x", table, "bad.csv")
    assert printed.stdout == ""


def test_a_place_that_cannot_be_written_is_named(table):
    result = run("predict", "runs/x", table, "--output", "nowhere/out.csv")
    assert result.exit_code == 2
    assert "cannot be written" in last_error(result)
    assert "nowhere/out.csv" in last_error(result)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(("predict", "runs/x"), "Missing argument 'FILES…"), (("train",), "Missing argument 'SPEC'")],
)
def test_a_call_without_its_arguments_says_what_is_missing(arguments, part):
    result = run(*arguments)
    assert result.exit_code == 2
    assert part in last_error(result)


def test_the_help_of_the_commands_needs_no_torch():
    code = (
        "import sys, ensemblekit.cli\n"
        "for command in ('train', 'resume', 'evaluate', 'predict'):\n"
        "    try: ensemblekit.cli.main([command, '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'pydantic', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
