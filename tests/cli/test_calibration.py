"""The commands calibrate and conform, and what they change in evaluate and predict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.commands import last_error, run
from helpers.small_runs import small_spec, training

import ensemblekit as ek

DATA = {"name": "digits", "limit_train": 500, "limit_test": 200, "validation_fraction": 0.3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small_spec(data=DATA, model={"name": "mlp", "hidden": [16]}, training=training(epochs=6))
    return ek.train(spec, tmp_path_factory.mktemp("runs") / "run", progress=False).path


@pytest.fixture
def path(trained: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(trained, tmp_path / "run"))


def test_calibrate_shows_what_it_gains_and_for_which_combiner(path):
    result = run("calibrate", path)
    assert result.exit_code == 0, result.stderr
    assert "for the combiner mean, fitted to 433 validation samples" in result.stdout
    for text in ("temperature ", "NLL", "ECE", "ECE, bins of equal mass", "Brier score", "is right after", "--undo"):
        assert text in result.stdout


def test_calibrate_prints_one_flat_object(path):
    for method in ("temperature", "vector", "isotonic", "beta"):
        result = run("calibrate", path, "--with", method, "--json")
        values = json.loads(result.stdout)
        assert (values["method"], values["combiner"]) == (method, "mean")
        assert ("temperature" in values) == (method == "temperature")
        assert not any(isinstance(value, dict | list) for value in values.values())
        assert {"nll_before", "nll_after", "ece_before", "ece_after", "brier_before", "brier_after"} <= values.keys()
    values = json.loads(run("calibrate", path, "--members", "--json").stdout)
    assert {"temperature_0", "temperature_1", "temperature_2"} <= values.keys()


def test_evaluate_says_what_its_figures_are_for(path):
    assert "combiner mean, not calibrated" in run("evaluate", path).stdout
    assert "combiner" not in json.loads(run("evaluate", path, "--json").stdout)
    result = run("evaluate", path, "--combiner", "probabilities")
    assert "combiner probabilities, not calibrated" in result.stdout
    assert json.loads(run("evaluate", path, "--combiner", "vote", "--json").stdout)["combiner"] == "vote"
    run("calibrate", path)
    run("conform", path, "--error", "0.2")
    result = run("evaluate", path)
    assert "combiner mean, calibrated (temperature), coverage of at least 0.8 asked (lac)" in result.stdout
    assert "prediction sets by their number of classes" in result.stdout
    assert "test_mean_set_size" in result.stdout
    values = json.loads(run("evaluate", path, "--json").stdout)
    assert (values["combiner"], values["calibration"]) == ("mean", "temperature")
    assert 0.6 < values["test_coverage"] < 0.95
    detailed = json.loads(run("evaluate", path, "--json", "--per-class").stdout)
    assert "coverage" in detailed["classes"][0]
    assert detailed["set_sizes"][0].keys() == {"size", "count", "coverage"}


def test_conform_says_what_coverage_to_expect_and_is_undone(path):
    result = run("conform", path, "--error", "0.1", "--score", "aps")
    assert result.exit_code == 0, result.stderr
    assert "prediction sets with an error of at most 0.1 for the combiner mean" in result.stdout
    assert "90.1 % ± 1.4" in result.stdout  # of Beta(391, 43)
    values = json.loads(run("conform", path, "--json").stdout)
    assert values["score"] == "lac"
    assert values["expected_coverage"] == pytest.approx(391 / 434)
    assert values["calibration"] is None
    assert not any(isinstance(value, dict | list) for value in values.values())
    assert json.loads(run("conform", path, "--undo", "--json").stdout) == {"removed": True, "path": path}
    assert "has no prediction sets" in run("conform", path, "--undo").stdout
    assert run("calibrate", path, "--undo").stdout == f"{path} has no calibration\n"


def test_notes_of_json_go_to_standard_error(path):
    run("calibrate", path)
    result = run("conform", path, "--json")
    json.loads(result.stdout)
    assert "note: applied after the calibration (temperature)" in result.stderr


@pytest.mark.faults
def test_what_cannot_be_guaranteed_is_refused_with_a_way_out(path):
    result = run("conform", path, "--error", "0.002")
    assert result.exit_code == 2
    assert last_error(result).startswith(
        "error: 433 validation samples are too few for an error of 0.002: 499 are needed"
    )
    assert "use --error 0.0024 or more" in last_error(result)
    assert run("conform", path, "--error", "0.0024").exit_code == 0
    assert run("conform", path, "--error", "1").exit_code == 2
    assert run("calibrate", path, "--with", "magic").exit_code == 2


@pytest.mark.faults
def test_a_damaged_file_ends_every_verb_that_uses_it_with_5(path):
    run("calibrate", path)
    file = Path(path, "calibration.json")
    file.write_text(file.read_text().replace("temperature", "Temperature", 1))
    for verb in (["evaluate", path], ["predict", path, "x.png"], ["conform", path], ["report", path]):
        result = run(*verb)
        assert result.exit_code == 5, verb
        assert "calibration.json" in last_error(result)
        assert f"ensemblekit calibrate {path} --undo" in last_error(result)
    assert run("resume", path, "--quiet").exit_code == 0
    assert run("calibrate", path, "--undo").exit_code == 0
    assert run("evaluate", path, "--json").exit_code == 0
