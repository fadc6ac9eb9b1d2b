"""Losses with more outputs than targets: everything works, and in the right units."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.probabilistic_losses import NormalNLL, Pinball
from sklearn.datasets import load_diabetes

import ensemblekit as ek
from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.inference.prediction import predict_files

LOSSES = {"normal_nll": NormalNLL, "pinball": Pinball}
NUM_OUTPUTS = {"normal_nll": 2, "pinball": 3}


def spec_of(loss: str, table: Path) -> dict:
    return {
        "data": {"name": "table", "path": str(table), "target": "progression", "task": "regression"},
        "model": {"name": "mlp", "hidden": [16], "batch_norm": False},
        "ensemble": {"members": 3},
        "training": {"epochs": 8, "batch_size": 32, "loss": loss, "optimizer": {"name": "adam", "lr": 0.01}},
        "engine": {"name": "sequential", "device": "cpu"},
    }


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """The diabetes data in its original units."""
    features, progression = load_diabetes(return_X_y=True, scaled=False)
    path = tmp_path_factory.mktemp("data") / "diabetes.csv"
    rows = [[*map(float, row), float(target)] for row, target in zip(features, progression, strict=True)]
    header = [*(f"x{index}" for index in range(10)), "progression"]
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]))
    return path


@pytest.fixture(scope="module", params=sorted(LOSSES))
def run(request, table, tmp_path_factory) -> ek.Run:
    path = tmp_path_factory.mktemp("runs") / request.param
    return ek.train(spec_of(request.param, table), path, progress=False, plugins=LOSSES.values())


@pytest.fixture
def loss(run) -> ek.Loss:
    return run.spec.loss


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(20, 10, generator=torch.Generator().manual_seed(0))


def test_metrics_are_those_of_the_point_predictions_in_original_units(run, loss):
    kept = run.outputs("test")
    assert kept.outputs.shape[-1] == NUM_OUTPUTS[loss.name]
    predicted = loss.point(run.combiner().combine(kept.outputs))
    error = (predicted - kept.targets).square().mean()
    assert run.metrics["test_mse"] == pytest.approx(float(error), rel=1e-4)
    assert run.metrics["test_mse"] < float(kept.targets.var()), "better than a constant"
    own = [float((loss.point(member) - kept.targets).square().mean()) for member in kept.outputs]
    assert [row["mse"] for row in run.members] == pytest.approx(own, rel=1e-4)


def test_outputs_are_raw_and_predictions_are_points(run, loss, inputs):
    ensemble = ek.load(run.path, plugins=LOSSES.values())
    combined, predicted = ensemble(inputs), ensemble.predict(inputs)
    assert combined.shape == (20, NUM_OUTPUTS[loss.name])
    assert predicted.shape == (20, 1)
    assert torch.equal(predicted, loss.point(combined))
    assert torch.allclose(ensemble.member_outputs(inputs).mean(dim=0), combined)
    assert 50 < float(predicted.mean()) < 250, "targets run from 25 to 346"


def test_the_scaling_of_outputs_is_that_of_the_targets(run, loss, inputs):
    ensemble = ek.load(run.path, plugins=LOSSES.values())
    learned, restored = ensemble.learned_outputs(inputs), ensemble.member_outputs(inputs)
    std, mean = ensemble.target_scaling.std[0], ensemble.target_scaling.mean[0]
    if loss.name == "pinball":
        expected = learned.double() * std + mean
    else:
        expected = torch.stack([learned[..., 0].double() * std + mean, learned[..., 1] + 2 * math.log(std)], dim=-1)
    assert torch.allclose(restored, expected)
    assert torch.allclose(ensemble.combiner.learned(restored), learned, atol=1e-5)


def test_a_file_is_predicted_with_points_and_deviations(run, loss, table):
    ensemble = ek.load(run.path, plugins=LOSSES.values())
    records = [prediction.to_dict() for prediction in predict_files(ensemble, [table], members=True)]
    inputs = ensemble.spec.data.prepare(table, ensemble.preparation).inputs
    members = loss.point(ensemble.member_outputs(inputs))[..., 0]
    assert list(records[0]) == ["file", "row", "value", "standard_deviation", *(f"member_value[{m}]" for m in range(3))]
    expected = ensemble.predict(inputs).flatten().tolist()
    assert [record["value"] for record in records] == pytest.approx(expected, rel=1e-5)
    deviations = members.std(dim=0, correction=0).tolist()
    assert [record["standard_deviation"] for record in records] == pytest.approx(deviations, rel=1e-3)


def test_evaluating_the_run_again_gives_the_same_metrics(run):
    again = ek.evaluate_run(run.path, plugins=LOSSES.values())
    names = [name for name in run.metrics if name.startswith("test_")]
    assert {name: again[name] for name in names} == pytest.approx({name: run.metrics[name] for name in names}, rel=1e-4)


def test_runs_with_different_losses_are_compared_and_reported(table, tmp_path):
    runs = [
        ek.train(spec_of(loss, table), tmp_path / loss, progress=False, plugins=LOSSES.values())
        for loss in ("normal_nll", "pinball", "mse")
    ]
    comparison = ek.compare([run.path for run in runs], plugins=LOSSES.values())
    comparison.plot(tmp_path / "figure.svg")
    rows = {row["run"]: row for row in _named(comparison, runs)}
    for run in runs:
        assert rows[run.path.name]["mse"] == pytest.approx(run.metrics["test_mse"], rel=1e-3)
    for run in runs:
        page = ek.report(run.path, plugins=LOSSES.values()).read_text()
        assert "Predicted against true values" in page


def _named(comparison, runs):
    for row in comparison.table():
        name = next(run.path.name for run in runs if run.spec.loss.name in json.dumps(row, default=str))
        yield {**row, "run": name}


def test_a_loss_without_second_derivative_has_no_diversity(table, tmp_path, capsys):
    run = ek.train(spec_of("pinball", table), tmp_path / "run", plugins=[Pinball])
    names = {name for row in (*run.history, run.metrics) for name in row}
    assert {name for name in names if "diversity" in name or "remainder" in name} == set()
    assert {"test_loss", "test_mean_output_loss", "test_mean_member_loss", "test_mse"} <= names
    assert "diversity" not in capsys.readouterr().out
    assert "diversity" not in ek.compare([run.path], plugins=[Pinball]).table()[0]
    outputs, target = torch.zeros(2, 4, 3), torch.ones(4, 1)
    assert "diversity" not in ek.evaluate(outputs, target, Pinball())
    with pytest.raises(UsageError, match="not twice differentiable"):
        ek.decompose(outputs, target, Pinball())


class NoPoint(NormalNLL):
    """Does not say which of its outputs is the prediction."""

    def point(self, outputs):
        return outputs


def test_a_loss_whose_point_has_another_width_than_the_targets_is_refused_before_training(table, tmp_path):
    with pytest.raises(SpecError, match=r"has 2 values, but the targets of .table. have 1"):
        ek.train(spec_of("no_point", table), tmp_path / "run", progress=False, plugins=[NoPoint])
    assert not (tmp_path / "run").exists()
