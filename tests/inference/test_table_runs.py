"""A run on a table is self-contained: predictions and evaluations of files depend on the run directory alone."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek
from ensemblekit.api import run_spec
from ensemblekit.inference.evaluation import evaluate_on
from ensemblekit.inference.prediction import predict_files
from ensemblekit.members.python_specs import registry_of
from ensemblekit.testing.toy_run import CopyAfterEpoch, trained_weights

NUM_ROWS = 80
SPEC = {
    "model": {"name": "mlp", "hidden": [8]},
    "ensemble": {"members": 2},
    "method": {"name": "boosting"},
    "training": {"epochs": 2, "batch_size": 16},
    "engine": {"name": "sequential", "device": "cpu"},
}


def lines(count: int = NUM_ROWS) -> list[str]:
    random = np.random.default_rng(0)
    sizes = random.normal(0, 1, count).round(4)
    colours = random.choice(["red", "green", "blue"], count)
    return [
        "size,colour,label,price",
        *(
            f"{size},{colour},{'large' if size > 0 else 'small'},{1_000_000_000 + 10 * size + i / 1000:.3f}"
            for i, (size, colour) in enumerate(zip(sizes, colours, strict=True))
        ),
    ]


@pytest.fixture(scope="module", params=["label", "price"])
def trained(request, tmp_path_factory) -> tuple[Path, str, str]:
    """A run on the table rows.csv that was started with a relative path, the table's text and the target."""
    folder = tmp_path_factory.mktemp(request.param)
    text = "\n".join(lines())
    (folder / "rows.csv").write_text(text)
    other = "price" if request.param == "label" else "label"
    data = {"name": "table", "path": "rows.csv", "target": request.param, "ignore": [other]}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ek.train({**SPEC, "data": data}, "run", progress=False)
    return folder, text, request.param


def predictions(run_path: Path, file: Path) -> list[dict[str, str]]:
    result = run("predict", str(run_path), str(file))
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


def test_predictions_do_not_depend_on_the_training_file_or_the_current_directory(trained, tmp_path, monkeypatch):
    folder, text, _ = trained
    new = tmp_path / "new.csv"
    new.write_text(text)
    expected = predictions(folder / "run", new)
    rows = folder / "rows.csv"
    try:
        monkeypatch.chdir(tmp_path)
        assert predictions(folder / "run", new) == expected
        rows.write_text("\n".join([line.replace("red", "blue").replace("0", "7") for line in lines()]))
        assert predictions(folder / "run", new) == expected
        rows.unlink()
        assert predictions(folder / "run", new) == expected
    finally:
        rows.write_text(text)


def test_a_file_with_the_targets_is_evaluated_as_the_run_prepared_its_own(trained, tmp_path, monkeypatch):
    folder, text, target = trained
    monkeypatch.chdir(tmp_path)  # nor does the run's own evaluation depend on where one stands
    own = ek.evaluate_run(folder / "run")
    assert own == pytest.approx(ek.open_run(folder / "run").metrics, rel=1e-5, abs=1e-6)
    whole = tmp_path / "whole.csv"
    whole.write_text(text)
    result = run("evaluate", str(folder / "run"), "--data", str(whole), "--json")
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics == ek.evaluate_run(folder / "run", data=whole) == ek.evaluate_run(folder / "run", data=str(whole))
    answers = predictions(folder / "run", whole)
    truth = [row[target] for row in csv.DictReader(io.StringIO(text))]
    if target == "label":
        correct = np.mean([answer["class"] == name for answer, name in zip(answers, truth, strict=True)])
        assert metrics["test_accuracy"] == pytest.approx(correct)
    else:
        errors = np.array([float(answer["value"]) for answer in answers]) - np.array(truth, dtype=float)
        assert metrics["test_mse"] == pytest.approx(np.mean(errors**2), rel=1e-4)
        assert metrics["test_rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)
        assert metrics["test_mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_a_file_with_another_delimiter_has_to_be_saved_with_that_of_the_run(trained, tmp_path, verb):
    folder, text, _ = trained
    new = tmp_path / "new.csv"
    new.write_text(text.replace(",", ";"))
    result = run(verb, str(folder / "run"), *(["--data"] if verb == "evaluate" else []), str(new))
    assert result.exit_code == 3
    assert last_error(result).endswith('save the file with the delimiter of the training table, ","')


def test_an_evaluation_begins_with_the_number_of_samples_and_their_data(trained, monkeypatch):
    monkeypatch.chdir(trained[0])
    assert run("evaluate", "run").stdout.splitlines()[0] == "16 test samples of table"
    assert run("evaluate", "run", "--data", "rows.csv").stdout.splitlines()[0] == f"{NUM_ROWS} rows of rows.csv"
    assert "num_samples" not in json.loads(run("evaluate", "run", "--json").stdout)


def test_a_training_file_that_was_moved_has_to_be_put_back(trained, tmp_path):
    folder, _, _ = trained
    rows, moved = folder / "rows.csv", folder / "moved.csv"
    shutil.copytree(folder / "run", tmp_path / "run")
    rows.rename(moved)
    try:
        resumed = run("resume", str(tmp_path / "run"), "--epochs", "3")
        evaluated = run("evaluate", str(folder / "run"))
    finally:
        moved.rename(rows)
    for result in (resumed, evaluated):
        assert result.exit_code == 3
        assert f"{rows}; put the file back at that path" in last_error(result)
    assert last_error(evaluated).endswith("or give it with --data FILE")


def test_kept_outputs_survive_a_changed_training_file_but_resuming_says_that_it_differs(trained, tmp_path):
    folder, text, _ = trained
    path, rows = Path(shutil.copytree(folder / "run", tmp_path / "run")), folder / "rows.csv"
    recorded = ek.open_run(path).metrics
    try:
        rows.write_text("\n".join([lines()[0], *reversed(lines()[1:])]))
        resumed, evaluated = run("resume", str(path), "--epochs", "3"), run("evaluate", str(path))
        assert run("evaluate", str(path), "--combiner", "mean").exit_code == 0
        rows.unlink()
        assert ek.open_run(path).metrics == recorded
        assert len(ek.open_run(path).outputs("validation").targets) == 6
    finally:
        rows.write_text(text)
    for result in (resumed, evaluated):
        assert result.exit_code == 3
        assert "the data is not what the run was started with" in last_error(result)


def test_a_file_without_targets_or_with_others_cannot_be_evaluated(trained, tmp_path):
    folder, _, target = trained
    new = tmp_path / "new.csv"
    new.write_text("size,colour\n1,red\n")
    result = run("evaluate", str(folder / "run"), "--data", str(new))
    assert result.exit_code == 3
    assert f'expected a column "{target}" to predict' in last_error(result)
    new.write_text(f"size,colour,{target}\n1,red,huge\n")
    result = run("evaluate", str(folder / "run"), "--data", str(new))
    assert result.exit_code == 3
    assert "huge" in last_error(result)
    assert "line 2" in last_error(result)


def test_a_run_that_has_no_table_says_that_it_takes_no_file(tmp_path):
    data = (torch.randn(12, 3), torch.arange(12) % 2)
    ek.train({**SPEC, "data": "given"}, tmp_path / "run", progress=False, data=(data, data))
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ek.DataError, match="cannot be evaluated on a file"):
        ek.evaluate_run(tmp_path / "run", data=str(file))


@pytest.fixture(scope="module")
def regression(tmp_path_factory) -> tuple[ek.Run, tuple[torch.Tensor, torch.Tensor]]:
    """A run on real targets in thousands, given in Python, and its test data."""
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    targets = 5000 + 100 * inputs.sum(dim=1, keepdim=True)
    tables = {**SPEC, "data": {"name": "given", "validation_fraction": 0}, "training": {"epochs": 3}}
    path = tmp_path_factory.mktemp("given") / "run"
    train, test = (inputs[:40], targets[:40]), (inputs[40:], targets[40:])
    return ek.train(tables, path, progress=False, data=(train, test)), test


def test_a_regression_predicts_in_original_units_and_reports_errors_in_both(regression):
    trained_run, (inputs, targets) = regression
    ensemble = trained_run.ensemble
    with torch.no_grad():
        combined = ensemble(inputs)
        members = ensemble.member_outputs(inputs)
        torch.testing.assert_close(ensemble.combine(members), combined)
    assert (combined - 5000).abs().max() < 1000
    errors = combined - targets
    metrics, std = trained_run.metrics, ensemble.target_scaling.std[0]
    assert metrics["test_mse"] == pytest.approx(float(errors.square().mean()), rel=1e-4)
    assert metrics["test_mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-4)
    assert metrics["test_standardised_mse"] == pytest.approx(metrics["test_mse"] / std**2)
    assert metrics["test_loss"] == pytest.approx(metrics["test_standardised_mse"] / 2, rel=1e-5)
    member_errors = (members - targets).square().mean(dim=(1, 2))
    assert [row["mse"] for row in trained_run.members] == pytest.approx(member_errors.tolist(), rel=1e-4)


def test_evaluation_on_other_data_compares_in_original_units(regression):
    """Other data has other means and deviations of its own; errors do not depend on them."""
    trained_run, (inputs, targets) = regression
    other = ek.data_from_datasets((inputs[:5], targets[:5] * 3), (inputs, targets), seed=0, validation_fraction=0)
    metrics = evaluate_on(trained_run.ensemble, other)
    for name in ("test_mse", "test_r2", "test_loss", "test_standardised_mse"):
        assert metrics[name] == pytest.approx(trained_run.metrics[name], rel=1e-3)


def test_a_resumed_regression_is_bit_identical_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("\n".join(lines()))
    data = {"name": "table", "path": "rows.csv", "target": "price", "ignore": ["label"]}
    stopped = tmp_path / "stopped"
    spec = ek.load_spec({**SPEC, "data": data})
    whole = run_spec(spec, registry_of(), "whole", [CopyAfterEpoch(1, stopped)])
    monkeypatch.chdir("/")
    resumed = ek.resume(stopped, progress=False)
    assert resumed.metrics == whole.metrics
    assert resumed.ensemble.target_scaling == ek.load(tmp_path / "whole").target_scaling
    ours, theirs = trained_weights(stopped), trained_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def old_run(path: Path, spec: str) -> Path:
    """A run directory as version 0.1.0 began it."""
    path.mkdir()
    record = {
        "format_version": 1,
        "created": "2024-01-01T00:00:00+00:00",
        "status": "interrupted",
        "spec_sha256": hashlib.sha256(spec.encode()).hexdigest(),
        "spec": spec,
    }
    (path / "spec.toml").write_text(spec)
    (path / "environment.json").write_text("{}")
    (path / "run.json").write_text(json.dumps(record))
    (path / "checkpoints").mkdir()
    return path


@pytest.mark.parametrize(
    "data", ['name = "table"\npath = "rows.csv"\ntarget = "y"\ntask = "regression"', 'name = "given"']
)
def test_a_run_of_version_0_1_0_is_read_without_standardised_targets(tmp_path, data):
    path = old_run(tmp_path / "run", f'[data]\n{data}\n[model]\nname = "mlp"\n[training]\nloss = "mse"\n')
    assert ek.open_run(path).spec.data.standardise_targets is False


def test_predictions_in_large_units_keep_their_digits(tmp_path):
    """Around 1e9, float32 has steps of 64."""
    ensemble_inputs = torch.linspace(-1, 1, 40)[:, None]
    targets = 1e9 + ensemble_inputs.double()
    tables = {**SPEC, "data": {"name": "given", "validation_fraction": 0}, "training": {"epochs": 40, "batch_size": 8}}
    data = (ensemble_inputs, targets)
    ensemble = ek.train(tables, tmp_path / "run", progress=False, data=(data, data)).ensemble
    file = tmp_path / "rows.csv"
    file.write_text("x\n-1\n0\n1\n")
    values = [answer.to_dict()["value"] for answer in predict_files(ensemble, [file])]
    assert values == sorted(values)
    assert len(set(values)) == 3
    assert abs(values[1] - 1e9) < 1
