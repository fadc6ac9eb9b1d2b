"""The command distil passes on what was asked for, and prints the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import last_error, run
from helpers.tiny_runs import SPEC

import ensemblekit as ek
from ensemblekit.inference import distillation, students

FAST = ("--set", "engine.name=sequential", "--set", "engine.device=cpu")


@pytest.fixture(scope="module", autouse=True)
def short_timing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(students, "MIN_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return ek.train(SPEC, tmp_path_factory.mktemp("teacher") / "run", progress=False).path


def test_it_prints_one_flat_object(teacher, tmp_path):
    options = ("--model", '{name="mlp", hidden=[4]}', "--epochs", "1", "--labels-share", "0.4", "--temperature", "3")
    result = run("distil", str(teacher), *options, "--baseline", "--json", "--out", str(tmp_path / "student"), *FAST)
    figures = json.loads(result.stdout)
    assert result.exit_code == 0
    assert all(isinstance(value, int | float | str | None) for value in figures.values())
    assert figures["path"] == str(tmp_path / "student")
    assert figures["baseline_path"] == str(tmp_path / "student-baseline")
    assert {"test_accuracy", "teacher_test_accuracy", "baseline_test_nll", "time_ratio"} <= figures.keys()
    spec = ek.open_run(tmp_path / "student").spec
    assert spec.training.epochs == 1
    assert spec.model.hidden == (4,)
    assert (spec.methods[0].temperature, spec.methods[0].share) == (3.0, 0.6)


def test_it_prints_a_table(teacher, tmp_path):
    result = run("distil", str(teacher), "--model", "mlp", "--uncertainty", "--out", str(tmp_path / "student"), *FAST)
    lines = result.stdout.splitlines()
    (start,) = [index for index, line in enumerate(lines) if line.startswith("run ")]
    assert lines[start].split()[1:4] == ["test_accuracy", "test_nll", "test_ece"]
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["student", "teacher"]
    assert "× the time of the ensemble's" in lines[start + 3]
    assert lines[start + 4].startswith("correlation of the mutual information with the ensemble's: ")


def test_quiet_prints_the_path_alone(teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("distil", str(teacher), "--model", "mlp", "--quiet", *FAST)
    assert result.stdout == f"{Path('runs', 'run-student-1')}\n"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--model", "{name="), 2, "neither a name nor a TOML table"),
        (("--model", "mpl"), 2, "mlp"),
        (("--model", "mlp", "--labels-share", "2"), 2, "--labels-share"),
        (("--model", "mlp", "--temperature", "0"), 2, "--temperature"),
        (("--model", "mlp", "--set", "data.normalise=true"), 2, "prepared differently"),
        ((), 2, "--model"),
    ],
)
def test_what_is_wrong_is_said(teacher, tmp_path, options, code, message):
    result = run("distil", str(teacher), *options, "--out", str(tmp_path / "student"))
    assert result.exit_code == code
    assert message in last_error(result)
    assert not (tmp_path / "student").exists()


def test_data_that_has_changed_since_is_refused(teacher, tmp_path, monkeypatch):
    load = distillation.load_data

    def changed(*arguments):
        data = load(*arguments)
        data.fingerprint["train"]["inputs_sha256"] = "other"
        return data

    monkeypatch.setattr(distillation, "load_data", changed)
    result = run("distil", str(teacher), "--model", "mlp", "--out", str(tmp_path / "student"))
    assert result.exit_code == 3
    assert "train split: the inputs changed" in last_error(result)
    assert not (tmp_path / "student").exists()
