"""Metrics against scikit-learn and loops written out."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from sklearn import metrics as sk

import ensemblekit as ek
from ensemblekit.core import metrics

GENERATOR = torch.Generator().manual_seed(5)
M, N, C = 4, 200, 6
OUTPUTS = 2 * torch.randn(M, N, C, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(C, (N,), generator=GENERATOR)
PROBABILITIES = OUTPUTS.mean(0).softmax(-1).numpy()
PREDICTIONS = OUTPUTS.argmax(-1)


def test_classification_metrics_equal_scikit_learns():
    found = ek.evaluate(OUTPUTS, CLASSES)
    accuracies = [sk.accuracy_score(CLASSES, PREDICTIONS[m]) for m in range(M)]
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(CLASSES, PROBABILITIES.argmax(-1)))
    assert found["nll"] == pytest.approx(sk.log_loss(CLASSES, PROBABILITIES, labels=range(C)))
    assert found["loss"] == pytest.approx(found["nll"])
    assert found["mean_member_accuracy"] == pytest.approx(sum(accuracies) / M)
    assert found["best_member_accuracy"] == pytest.approx(max(accuracies))
    assert found["worst_member_accuracy"] == pytest.approx(min(accuracies))
    one_hot = torch.nn.functional.one_hot(CLASSES, C).numpy()
    assert found["brier"] == pytest.approx(C * sk.mean_squared_error(one_hot, PROBABILITIES))


def test_oracle_accuracy_asks_whether_any_member_is_right():
    right = sum(any(int(PREDICTIONS[m, n]) == int(CLASSES[n]) for m in range(M)) for n in range(N))
    assert ek.evaluate(OUTPUTS, CLASSES)["oracle_accuracy"] == pytest.approx(right / N)


def test_disagreement_is_the_mean_over_all_pairs():
    pairs = [(PREDICTIONS[a] != PREDICTIONS[b]).double().mean().item() for a, b in combinations(range(M), 2)]
    assert ek.evaluate(OUTPUTS, CLASSES)["disagreement"] == pytest.approx(sum(pairs) / len(pairs))
    assert ek.evaluate(OUTPUTS[:1], CLASSES)["disagreement"] == 0


def test_calibration_error_equals_a_loop_over_bins():
    confidence, predicted = PROBABILITIES.max(-1), PROBABILITIES.argmax(-1)
    expected = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            gap = (predicted == CLASSES.numpy())[inside].mean() - confidence[inside].mean()
            expected += inside.mean() * abs(gap)
    assert ek.evaluate(OUTPUTS, CLASSES)["ece"] == pytest.approx(expected)


def test_a_sure_and_right_ensemble_is_perfectly_calibrated():
    sure = 50 * torch.nn.functional.one_hot(CLASSES, C).double().expand(M, -1, -1)
    found = ek.evaluate(sure, CLASSES)
    assert (found["accuracy"], found["oracle_accuracy"], found["disagreement"]) == (1, 1, 0)
    assert found["ece"] == pytest.approx(0, abs=1e-12)
    assert found["mutual_information"] == pytest.approx(0, abs=1e-12)


def test_mutual_information_of_two_sure_members_that_contradict_each_other_is_one_bit():
    outputs = torch.tensor([[[100.0, 0.0]], [[0.0, 100.0]]], dtype=torch.float64)
    assert ek.evaluate(outputs, torch.tensor([0]))["mutual_information"] == pytest.approx(math.log(2))


def test_diversity_and_remainder_are_those_of_the_decomposition():
    found, parts = ek.evaluate(OUTPUTS, CLASSES), ek.decompose(OUTPUTS, CLASSES)
    assert found["diversity"] == pytest.approx(parts.diversity.item())
    assert found["remainder"] == pytest.approx(parts.remainder.item())
    assert found["mean_member_loss"] == pytest.approx(parts.mean_member_loss.item())


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_metrics_equal_scikit_learns(outputs):
    predictions = torch.randn(M, N, outputs, generator=GENERATOR, dtype=torch.float64)
    target = torch.randn(N, outputs, generator=GENERATOR, dtype=torch.float64)
    found = ek.evaluate(predictions, target.squeeze(-1) if outputs == 1 else target)
    errors = [sk.mean_squared_error(target, predictions[m]) for m in range(M)]
    assert found["mse"] == pytest.approx(sk.mean_squared_error(target, predictions.mean(0)))
    assert found["rmse"] == pytest.approx(sk.mean_squared_error(target, predictions.mean(0)) ** 0.5)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(target, predictions.mean(0)))
    assert found["r2"] == pytest.approx(sk.r2_score(target, predictions.mean(0)))
    assert found["mean_member_mse"] == pytest.approx(sum(errors) / M)
    assert found["best_member_mse"] == pytest.approx(min(errors))
    assert found["worst_member_mse"] == pytest.approx(max(errors))
    assert "accuracy" not in found


def test_errors_of_standardised_targets_are_in_original_units():
    outputs, target = torch.randn(M, N, 2, generator=GENERATOR), torch.randn(N, 2, generator=GENERATOR)
    std = torch.tensor([10.0, 3.0], dtype=torch.float64)
    scaled = metrics.evaluate(outputs, target, ek.MSE(), target_std=std)
    original = metrics.evaluate(outputs * std, target * std, ek.MSE())
    plain = metrics.evaluate(outputs, target, ek.MSE())
    for name in ("mse", "rmse", "mae", "r2", "mean_member_mse", "best_member_mse", "worst_member_mse"):
        assert scaled[name] == pytest.approx(original[name])
    assert scaled["standardised_mse"] == pytest.approx(plain["mse"])
    assert (scaled["loss"], scaled["diversity"]) == (plain["loss"], plain["diversity"])
    assert "standardised_mse" not in plain


@pytest.mark.parametrize(("guess", "score"), [(2.0, 1.0), (3.0, 0.0)])
def test_r2_of_a_constant_target_is_one_if_it_is_met(guess, score):
    target = torch.full((5, 1), 2.0)
    found = ek.evaluate(torch.full((2, 5, 1), guess), target)
    assert found["r2"] == score == sk.r2_score(target, torch.full((5, 1), guess))


@pytest.mark.parametrize("gap", [1.0, 90.0, 500.0])
def test_the_likelihood_of_a_sure_and_wrong_ensemble_is_its_loss(gap):
    found = ek.evaluate(torch.tensor([[[0.0, gap]]]), torch.tensor([0]))
    assert found["nll"] == pytest.approx(found["loss"], rel=1e-6)


def test_regression_is_measured_in_double_precision():
    assert ek.evaluate(torch.full((2, 10, 1), 1.1), torch.full((10, 1), 0.1))["r2"] == 0
    target = 1e5 + torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    guess = target + 0.5 * torch.randn(50, 1, generator=torch.Generator().manual_seed(1))
    found = ek.evaluate(guess.unsqueeze(0), target)
    assert found["r2"] == pytest.approx(sk.r2_score(target.double(), guess.double()), rel=1e-9)


def test_margin_losses_are_evaluated_as_two_classes():
    margins = torch.tensor([[[2.0], [-1.0], [0.5]], [[1.0], [0.5], [0.5]]], dtype=torch.float64)
    found = ek.evaluate(margins, torch.tensor([1, -1, -1]), loss="exponential")
    assert found["accuracy"] == pytest.approx(2 / 3)  # the means 1.5, -0.25 and 0.5 stand for +1, -1 and +1
    assert found["mean_member_accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2)


def test_outputs_that_require_a_gradient_can_be_evaluated():
    found = ek.evaluate(OUTPUTS.clone().requires_grad_(), CLASSES)
    assert found == ek.evaluate(OUTPUTS, CLASSES)
