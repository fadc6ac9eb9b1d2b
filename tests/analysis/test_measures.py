"""Measures of samples equal the metrics that a run reports, for every loss; resampled ones equal recomputed ones."""

from __future__ import annotations

import pytest
import torch
from helpers.kept_runs import Outputs, kept, kept_run

import ensemblekit as ek
from ensemblekit.analysis.bootstrap import resampled, resampled_shares
from ensemblekit.analysis.measures import MEASURES, measures, sample_measures, statistics_of


def values_of(run):
    return {name: statistic.value() for name, statistic in statistics_of(sample_measures(run)).items()}


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "nll"])
def test_means_over_samples_are_the_metrics_of_classification(loss):
    outputs = Outputs(num_members=3, num_samples=300).kept()
    if loss == "nll":
        outputs = kept(outputs.outputs.softmax(dim=-1), outputs.targets)
    overrides = {"training.loss": loss, **({"model.softmax": True} if loss == "nll" else {})}
    run = kept_run(outputs, overrides=overrides)
    expected, found = measures(run), values_of(run)
    assert {"accuracy", "nll", "ece", "brier", "oracle_accuracy", "diversity", "disagreement", "loss"} <= set(found)
    assert "mse" not in found
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


def test_means_over_samples_are_the_metrics_of_a_margin_loss():
    random = torch.Generator().manual_seed(0)
    targets = torch.randint(2, (200,), generator=random)
    run = kept_run(
        kept(torch.randn(3, 200, 1, generator=random) + targets.view(-1, 1), targets),
        overrides={"data": "given", "training.loss": "exponential"},
    )
    expected = measures(run)
    for name, value in values_of(run).items():
        assert value == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_means_over_samples_are_the_metrics_of_regression(num_outputs):
    random = torch.Generator().manual_seed(0)
    targets = torch.randn(250, num_outputs, generator=random) * 3 + 7
    outputs = targets + torch.randn(4, 250, num_outputs, generator=random)
    run = kept_run(kept(outputs, targets), overrides={"data": "diabetes", "training.loss": "mse"})
    expected, found = measures(run), values_of(run)
    assert {"mse", "rmse", "r2", "mean_member_mse", "best_member_mse", "diversity"} <= set(found)
    assert "accuracy" not in found
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("task", ["classes", "values"])
def test_a_resampled_statistic_is_the_metric_of_the_resampled_samples(task):
    if task == "classes":
        run = kept_run(Outputs(num_members=3, num_samples=80))
        loss = "cross_entropy"
    else:
        random = torch.Generator().manual_seed(0)
        targets = torch.randn(80, 2, generator=random) * 3 + 7
        outputs = targets + torch.randn(3, 80, 2, generator=random)
        run = kept_run(kept(outputs, targets), overrides={"data": "diabetes", "training.loss": "mse"})
        loss = "mse"
    statistics = statistics_of(sample_measures(run))
    values = resampled(list(statistics.values()), 5, seed=4)
    shares = next(resampled_shares(80, 5, seed=4))
    for row in range(5):
        chosen = torch.arange(80).repeat_interleave((shares[row] * 80).round().long())
        outputs = run.outputs("test")
        expected = ek.evaluate(outputs.outputs[:, chosen], outputs.targets[chosen], loss)
        for column, name in enumerate(statistics):
            assert float(values[row, column]) == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_recorded_measures_are_those_of_the_epoch_whose_weights_are_kept():
    history = {"train_loss": 0.3, "train_diversity": 0.1}
    run = kept_run(Outputs(num_samples=50), history=history, milliseconds_per_1000=2.5)
    found = measures(run)
    assert {name: found[name] for name in ("train_loss", "train_diversity", "parameters", "training_seconds")} == {
        "train_loss": 0.3,
        "train_diversity": 0.1,
        "parameters": 400,
        "training_seconds": 1.5,
    }
    assert found["milliseconds_per_1000"] == 2.5
    rows = [{"epoch": 1, "train_loss": 0.9}, {"epoch": 2, "train_loss": 0.5}]
    best = kept_run(Outputs(num_samples=50), overrides={"training.keep": "best"}, best_epoch=1)
    best.history[:] = rows
    assert measures(best)["train_loss"] == 0.9


def test_every_measure_has_a_title_and_a_known_unit():
    assert {measure.unit for measure in MEASURES.values()} <= {"", "%", "s", "ms"}
    assert all(measure.title for measure in MEASURES.values())
