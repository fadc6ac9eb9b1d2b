"""Runs whose networks predict distributions: the ensemble is a mixture, in original units, everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_diabetes

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.inference.prediction import predict_files

LOSSES = {"gaussian_nll": {"name": "gaussian_nll"}, "beta_nll": {"name": "gaussian_nll", "beta": 0.5}}
LOSSES["quantile"] = {"name": "quantile"}


def spec(loss: dict, table, **changes: object) -> dict:
    return {
        "data": {"name": "table", "path": str(table), "target": "progression", "task": "regression"},
        "model": {"name": "mlp", "hidden": [16], "batch_norm": False},
        "ensemble": {"members": 3},
        "training": {"epochs": 15, "batch_size": 32, "loss": loss, "optimizer": {"name": "adam", "lr": 0.005}},
        "engine": {"name": "sequential", "device": "cpu"},
    } | changes


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The diabetes data in its original units."""
    features, progression = load_diabetes(return_X_y=True, scaled=False)
    path = tmp_path_factory.mktemp("data") / "diabetes.csv"
    rows = [[*map(float, row), float(target)] for row, target in zip(features, progression, strict=True)]
    header = [*(f"x{index}" for index in range(10)), "progression"]
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]))
    return path


@pytest.fixture(scope="module")
def runs(table, tmp_path_factory) -> dict[str, ek.Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: ek.train(spec(loss, table), folder / name, progress=False) for name, loss in LOSSES.items()}


@pytest.mark.parametrize("name", ["gaussian_nll", "beta_nll"])
def test_the_variance_of_the_ensemble_includes_the_disagreement_of_its_members(runs, name):
    kept = runs[name].outputs("test")
    mean, log_variance = runs[name].combiner().combine(kept.outputs).unbind(dim=-1)
    means, log_variances = kept.outputs.unbind(dim=-1)
    torch.testing.assert_close(mean, means.mean(dim=0), rtol=1e-5, atol=1e-3)
    expected = (log_variances.exp() + means.square()).mean(dim=0) - means.mean(dim=0).square()
    torch.testing.assert_close(log_variance.exp(), expected, rtol=1e-4, atol=1e-2)
    assert bool((log_variance.exp() > log_variances.exp().mean(dim=0)).all())


def test_metrics_of_the_distribution_are_in_original_units(runs):
    run = runs["gaussian_nll"]
    kept = run.outputs("test")
    mean, log_variance = run.combiner().combine(kept.outputs).unbind(dim=-1)
    normal = torch.distributions.Normal(mean, (log_variance / 2).exp())
    expected = -normal.log_prob(kept.targets[:, 0].double()).mean()
    assert run.metrics["test_nll"] == pytest.approx(float(expected), rel=1e-5)
    constant = 0.5 * math.log(2 * math.pi * math.e * float(kept.targets.double().var()))
    assert run.metrics["test_nll"] < constant, "better than a constant normal distribution"
    assert 0.75 < run.metrics["test_interval_coverage"] <= 1
    assert 80 < run.metrics["test_interval_width"] < 300
    assert 20 < run.metrics["test_crps"] < 45


def test_quantiles_form_intervals_in_original_units(runs):
    run = runs["quantile"]
    kept = run.outputs("test")
    combined = run.combiner().combine(kept.outputs)
    low, _, high = combined.unbind(dim=-1)
    inside = (low <= kept.targets[:, 0]) & (kept.targets[:, 0] <= high)
    assert run.metrics["test_interval_coverage"] == pytest.approx(float(inside.double().mean()), abs=0.012)
    assert run.metrics["test_interval_width"] == pytest.approx(float((high - low).mean()), rel=1e-4)
    assert torch.equal(combined, combined.sort(dim=-1).values)


def test_predictions_show_the_deviation_of_the_ensemble_and_that_of_its_members(runs, table):
    ensemble = runs["gaussian_nll"].ensemble
    records = [prediction.to_dict() for prediction in predict_files(ensemble, [table])]
    assert list(records[0]) == ["file", "row", "value", "standard_deviation", "member_deviation"]
    inputs = ensemble.spec.data.prepare(table, ensemble.preparation).inputs
    expected = (ensemble(inputs)[:, 1] / 2).exp().tolist()
    assert [record["standard_deviation"] for record in records] == pytest.approx(expected, rel=1e-4)
    assert all(record["standard_deviation"] > record["member_deviation"] for record in records)


def test_predictions_show_quantiles(runs, table):
    records = [one.to_dict() for one in predict_files(runs["quantile"].ensemble, [table])]
    for record in records:
        assert record["quantile_0.05"] <= record["quantile_0.5"] <= record["quantile_0.95"]
        assert record["value"] == record["quantile_0.5"]


@pytest.mark.parametrize("name", list(LOSSES))
def test_such_runs_are_evaluated_compared_and_reported(runs, name):
    again = ek.evaluate_run(runs[name].path)
    assert dict(again) == pytest.approx({key: runs[name].metrics[key] for key in again}, rel=1e-3, abs=1e-6)
    assert "Predicted against true values" in ek.report(runs[name].path).read_text()
    row = ek.compare([runs[name].path]).table()[0]
    assert row["mse"] == pytest.approx(runs[name].metrics["test_mse"], rel=1e-3)
    assert ("diversity" in row) == (name == "gaussian_nll")


def test_an_explicit_combiner_takes_the_place_of_the_mixture(table, tmp_path):
    ensemble = {"members": 3, "combiner": "mean"}
    run = ek.train(spec(LOSSES["gaussian_nll"], table, ensemble=ensemble), tmp_path / "run", progress=False)
    kept = run.outputs("test")
    torch.testing.assert_close(run.combiner().combine(kept.outputs), kept.outputs.mean(dim=0), rtol=1e-4, atol=1e-3)


def test_stochastic_passes_are_one_mixture(table, tmp_path):
    changes = {"method": {"name": "dropout", "passes": 4}, "ensemble": {"members": 2}}
    changes["model"] = {"name": "mlp", "hidden": [16], "batch_norm": False, "dropout": 0.3}
    run = ek.train(spec(LOSSES["gaussian_nll"], table, **changes), tmp_path / "run", progress=False)
    kept = run.outputs("test")
    assert len(kept.outputs) == 8
    means, log_variances = kept.outputs.unbind(dim=-1)
    expected = (log_variances.exp() + means.square()).mean(dim=0) - means.mean(dim=0).square()
    found = run.combiner().combine(kept.outputs)[:, 1].exp()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("loss", ["gaussian_nll", "quantile"])
def test_losses_of_values_are_refused_for_classes(loss):
    table = {"data": "digits", "model": "mlp", "training": {"loss": loss}}
    with pytest.raises(SpecError, match=f'"{loss}" is a loss for values, but the task of "digits" is classification'):
        ek.load_spec(table)
