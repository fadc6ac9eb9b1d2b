"""Metrics against scikit-learn and loops written out."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import scipy.stats
import torch
from sklearn import metrics as sk

import ensemblekit as ek
from ensemblekit.core.errors import NumericError
from ensemblekit.core.losses import MSE, CrossEntropy, Exponential, GaussianHinge
from ensemblekit.core.metrics import evaluate, flat_metrics, translate_names

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


def test_entropy_is_aleatoric_entropy_plus_mutual_information():
    found = ek.evaluate(OUTPUTS, CLASSES)
    p = OUTPUTS.softmax(-1).numpy()
    assert found["entropy"] == pytest.approx(scipy.stats.entropy(p.mean(0), axis=-1).mean())
    assert found["aleatoric_entropy"] == pytest.approx(scipy.stats.entropy(p, axis=-1).mean())
    assert found["prediction_entropy"] == pytest.approx(scipy.stats.entropy(PROBABILITIES, axis=-1).mean())
    assert found["entropy"] == pytest.approx(found["aleatoric_entropy"] + found["mutual_information"], rel=1e-12)
    assert 0 < found["mutual_information"] < found["entropy"]


def test_mutual_information_of_members_whose_logits_cancel_does_not_exceed_the_entropy():
    outputs = torch.tensor([[[30.0, 0.0, 29.0]], [[0.0, 30.0, 29.0]]])  # the mean of the logits is sure of class 2
    found = ek.evaluate(outputs, torch.tensor([2]))
    assert found["prediction_entropy"] < 1e-4
    assert 0.5 < found["mutual_information"] <= found["entropy"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_is_refused_and_never_counts_as_correct(bad):
    outputs = OUTPUTS.clone()
    outputs[2, 17, CLASSES[17]] = bad
    with pytest.raises(NumericError, match="member 2 for sample 17"):
        ek.evaluate(outputs, CLASSES)


def test_a_combination_that_is_not_finite_is_refused():
    combined = OUTPUTS.sum(0)
    combined[3, 0] = math.inf
    with pytest.raises(NumericError, match="combined output for sample 3"):
        evaluate(OUTPUTS, CLASSES, CrossEntropy(), combined)


@pytest.mark.parametrize("combine", [lambda h: h.sum(0), lambda h: h.amax(0), lambda h: 0.9 * h[0] + 0.1 * h[1]])
def test_the_decomposition_closes_for_the_mean_output_however_outputs_are_combined(combine):
    found = evaluate(OUTPUTS, CLASSES, CrossEntropy(), combine(OUTPUTS))
    total = found["mean_member_loss"] - found["diversity"] + found["remainder"]
    assert found["mean_output_loss"] == pytest.approx(total)
    assert found["mean_output_loss"] == pytest.approx(sk.log_loss(CLASSES, PROBABILITIES, labels=range(C)))
    combined = combine(OUTPUTS).softmax(-1).numpy()
    assert found["loss"] == pytest.approx(sk.log_loss(CLASSES, combined, labels=range(C)))
    assert found["loss"] != pytest.approx(found["mean_output_loss"])


def test_the_bound_on_the_remainder_is_a_metric_if_the_loss_has_one():
    found = ek.evaluate(OUTPUTS, CLASSES)
    assert abs(found["remainder"]) <= found["remainder_bound"]
    assert found["remainder_bound"] == pytest.approx(ek.decompose(OUTPUTS, CLASSES).remainder_bound.item())
    assert "remainder_bound" not in ek.evaluate(OUTPUTS, CLASSES, loss=Unbounded())


class Unbounded(ek.Loss):
    """Cross-entropy without a bound on its third derivative."""

    def per_sample(self, outputs, target):
        return CrossEntropy().per_sample(outputs, target)


@pytest.mark.parametrize(("loss", "z"), [(Exponential(), 300.0), (GaussianHinge(), 20.0)])
def test_log_probabilities_do_not_underflow(loss, z):
    exact = {"exponential": -2 * z, "gaussian_hinge": float(scipy.stats.norm.logcdf(-math.sqrt(2) * z))}[loss.name]
    log_p = loss.log_probabilities(torch.tensor([[z]], dtype=torch.float64))
    assert log_p[0].tolist() == pytest.approx([exact, 0])
    near = torch.tensor([[0.3]], dtype=torch.float64)
    torch.testing.assert_close(loss.log_probabilities(near).exp(), loss.probabilities(near))


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
    assert found["rmse"] == pytest.approx(math.sqrt(sk.mean_squared_error(target, predictions.mean(0))))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(target, predictions.mean(0)))
    assert found["r2"] == pytest.approx(sk.r2_score(target, predictions.mean(0)))
    assert found["mean_member_mse"] == pytest.approx(sum(errors) / M)
    assert found["best_member_mse"] == pytest.approx(min(errors))
    assert found["worst_member_mse"] == pytest.approx(max(errors))
    assert "accuracy" not in found


def test_errors_of_standardised_targets_are_in_original_units():
    guess = torch.randn(M, N, 1, generator=GENERATOR, dtype=torch.float64)
    target = torch.randn(N, 1, generator=GENERATOR, dtype=torch.float64)
    plain, found = evaluate(guess, target, MSE()), evaluate(guess, target, MSE(), restore=lambda z: 50 + 3 * z)
    assert found["standardised_mse"] == pytest.approx(plain["mse"])
    for name in ("mse", "mean_member_mse", "best_member_mse", "worst_member_mse"):
        assert found[name] == pytest.approx(9 * plain[name])
    for name in ("rmse", "mae"):
        assert found[name] == pytest.approx(3 * plain[name])
    for name in ("loss", "mean_member_loss", "diversity", "remainder", "r2"):
        assert found[name] == pytest.approx(plain[name])
    assert "standardised_mse" not in plain


@pytest.mark.parametrize(("guess", "score"), [(2.0, 1.0), (3.0, 0.0)])
def test_r2_of_a_constant_target_is_one_if_it_is_met(guess, score):
    target = torch.full((5, 1), 2.0)
    found = ek.evaluate(torch.full((2, 5, 1), guess), target)
    assert found["r2"] == score == sk.r2_score(target, torch.full((5, 1), guess))


@pytest.mark.parametrize("gap", [1.0, 90.0, 500.0, 800.0, 1e6])
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


def test_names_of_version_0_1_0_are_translated_and_current_ones_kept():
    old = {"epoch": 1, "test_loss": 0.5, "mean_member_loss": 0.7, "oracle_accuracy": 0.9, "images_per_second": 100.0}
    new = {
        "epoch": 1,
        "test_loss": 0.5,
        "test_mean_member_loss": 0.7,
        "test_oracle_accuracy": 0.9,
        "samples_per_second": 100.0,
    }
    assert translate_names(old) == new
    assert translate_names(new) == new


def test_the_entropy_of_version_0_1_0_is_that_of_the_combined_prediction():
    assert translate_names({"mean_member_loss": 1.0, "test_entropy": 0.5, "validation_entropy": 0.4}) == {
        "test_mean_member_loss": 1.0,
        "test_prediction_entropy": 0.5,
        "validation_prediction_entropy": 0.4,
    }


def test_every_metric_of_a_split_has_its_prefix():
    found = ek.evaluate(OUTPUTS, CLASSES)
    assert list(flat_metrics(found, "validation")) == [f"validation_{name}" for name in found]


def test_a_bound_on_the_remainder_that_overflows_is_left_out_and_the_rest_is_as_computed():
    outputs = torch.tensor([[[1e15, 0.0]], [[0.0, 1e15]]])
    found = ek.evaluate(outputs, torch.tensor([0]))
    assert "remainder_bound" not in found
    assert math.isfinite(found["loss"])
    assert ek.evaluate(1e10 * outputs, torch.tensor([0]))["diversity"] == math.inf
