"""Calibrators against independent solutions: another search, scikit-learn, conditions of a minimum, closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from ensemblekit_combiners.probabilities import Probabilities
from ensemblekit_combiners.vote import Vote
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ensemblekit.core.losses import MSE, NLL, CrossEntropy, Exponential
from ensemblekit.core.metrics import calibration_error
from ensemblekit.core.objective import Objective
from ensemblekit.inference.calibration import Calibration
from ensemblekit.inference.calibrators import CALIBRATORS, FLOOR, Beta, Isotonic, Temperature, Vector
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.cross_fitting import cross_fitted, fit_calibration, stratified_folds
from ensemblekit.inference.reliability import adaptive_calibration_error, reliability_table
from ensemblekit.runs.outputs import KeptOutputs

CLASSES = 4


def sample(members: int = 3, samples: int = 400, scale: float = 2.5, seed: int = 0) -> KeptOutputs:
    """Overconfident members that are often right: float64 outputs and targets."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (samples,), generator=random)
    signal = 2 * torch.nn.functional.one_hot(targets, CLASSES)
    noise = torch.randn(samples, CLASSES, generator=random) + torch.randn(members, samples, CLASSES, generator=random)
    return KeptOutputs(scale * (signal + noise).double(), targets, torch.arange(samples))


def combiner(kept: KeptOutputs, plugin: object = None, loss: object = None) -> Combiner:
    return Combiner(Objective([], loss or CrossEntropy(), combiner=plugin), len(kept.outputs))


def numpy_nll(probabilities: np.ndarray, targets: np.ndarray) -> float:
    return float(-np.log(probabilities[np.arange(len(targets)), targets].clip(1e-300)).mean())


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def golden_section(function, low: float, high: float) -> float:
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def best_temperature(probabilities_at, targets: Tensor) -> float:
    """The temperature of the least NLL: a grid, then a golden-section search around its best point."""

    def nll(log_temperature: float) -> float:
        return numpy_nll(probabilities_at(math.exp(log_temperature)), targets.numpy())

    grid = np.linspace(-4, 4, 81)
    best = grid[np.argmin([nll(point) for point in grid])]
    return math.exp(golden_section(nll, best - 0.1, best + 0.1))


def test_the_temperature_is_that_of_a_golden_section_search():
    kept = sample()
    logits = kept.outputs.mean(dim=0)
    expected = best_temperature(lambda t: softmax(logits.numpy() / t), kept.targets)
    assert Temperature.fit(logits, kept.targets).temperature == pytest.approx(expected, rel=1e-6)


def test_the_derivative_of_the_likelihood_vanishes_at_the_temperature():
    kept = sample()
    logits = kept.outputs.mean(dim=0)
    scaled = logits / Temperature.fit(logits, kept.targets).temperature
    # closed form: d NLL / d(1/T) is the mean of the expected logit minus that of the true class
    expected = (scaled.softmax(dim=-1) * logits).sum(dim=-1)
    assert float((expected - logits.gather(1, kept.targets[:, None]).squeeze(1)).mean()) == pytest.approx(0, abs=1e-9)


def test_the_mixture_has_one_joint_temperature_of_its_members():
    kept = sample()
    expected = best_temperature(lambda t: softmax(kept.outputs.numpy() / t).mean(axis=0), kept.targets)
    found = fit_calibration("temperature", False, combiner(kept, Probabilities()), kept)
    assert found.temperature == pytest.approx(expected, rel=1e-6)
    of_the_mixture = Temperature.fit(combiner(kept, Probabilities()).log_probabilities(kept), kept.targets)
    assert found.temperature != pytest.approx(of_the_mixture.temperature, rel=1e-2)


@pytest.mark.parametrize("plugin", [None, Probabilities()], ids=["mean", "probabilities"])
@pytest.mark.parametrize("factor", [1e-3, 7.5, 400])
def test_outputs_times_s_have_the_temperature_times_s(plugin, factor):
    kept = sample()
    scaled = KeptOutputs(factor * kept.outputs, kept.targets, kept.index)
    temperatures = [fit_calibration("temperature", False, combiner(k, plugin), k).temperature for k in (kept, scaled)]
    assert temperatures[1] == pytest.approx(factor * temperatures[0], rel=1e-8)


@pytest.mark.parametrize("plugin", [None, Vote()], ids=["mean", "vote"])
def test_a_temperature_never_changes_a_prediction(plugin):
    kept = sample()
    plain = combiner(kept, plugin)
    calibrated = replace(plain, calibration=fit_calibration("temperature", False, plain, kept))
    assert calibrated.combine(kept.outputs).argmax(dim=-1).equal(plain.combine(kept.outputs).argmax(dim=-1))
    assert not calibrated.probabilities(kept.outputs).allclose(plain.probabilities(kept.outputs))


def test_each_member_gets_the_temperature_of_its_own_outputs():
    kept = sample()
    outputs = kept.outputs * torch.tensor([1.0, 3.0, 0.2])[:, None, None]
    own = KeptOutputs(outputs, kept.targets, kept.index)
    found = fit_calibration("temperature", True, combiner(own), own)
    expected = [best_temperature(lambda t, z=z: softmax(z.numpy() / t), kept.targets) for z in outputs]
    assert found.member_temperatures == pytest.approx(expected, rel=1e-6)
    combined = replace(combiner(own), calibration=found).combine(outputs)
    torch.testing.assert_close(
        combined, (outputs / torch.tensor(expected)[:, None, None]).mean(dim=0), rtol=1e-6, atol=1e-6
    )


def test_without_a_mistake_nothing_limits_the_confidence_and_the_temperature_stays_1():
    classes = torch.arange(40) % CLASSES
    found = Temperature.fit(3 * torch.nn.functional.one_hot(classes, CLASSES), classes)
    assert found.temperature == 1
    assert "nothing limits the confidence" in found.problem()


def test_vector_scaling_meets_the_conditions_of_a_minimum():
    kept = sample()
    logits = kept.outputs.mean(dim=0) + torch.tensor([0.0, 2.0, -1.0, 0.5])
    found = Vector.fit(logits, kept.targets)
    residual = found(logits).softmax(dim=-1) - torch.nn.functional.one_hot(kept.targets, CLASSES)
    # derivatives by the shifts and by the factors of the classes
    assert float(residual.mean(dim=0).abs().max()) < 1e-5
    assert float((residual * logits).mean(dim=0).abs().max()) < 1e-5


def test_vector_scaling_is_never_worse_than_a_temperature_on_its_own_data():
    kept = sample()
    logits = kept.outputs.mean(dim=0)
    losses = [
        float(torch.nn.functional.cross_entropy(kind.fit(logits, kept.targets)(logits), kept.targets))
        for kind in (Vector, Temperature)
    ]
    assert losses[0] < losses[1]


def test_isotonic_calibration_is_scikit_learns_one_versus_rest_renormalised():
    kept, new = sample(), sample(seed=1).outputs.mean(dim=0)
    logits = kept.outputs.mean(dim=0)
    before, other = softmax(logits.numpy()), softmax(new.numpy())
    columns = [
        IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        .fit(before[:, c], kept.targets.numpy() == c)
        .predict(other[:, c])
        for c in range(CLASSES)
    ]
    expected = np.stack(columns, axis=1).clip(FLOOR)
    expected /= expected.sum(axis=1, keepdims=True)
    found = Isotonic.fit(logits, kept.targets)(new).softmax(dim=-1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_beta_calibration_is_a_logistic_regression_on_both_logarithms():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 2, generator=random, dtype=torch.float64) * 2
    positive = torch.rand(600, generator=random) < (0.4 * (logits[:, 1] - logits[:, 0]) + 0.5).sigmoid()
    p = softmax(logits.numpy())[:, 1]
    features = np.stack([np.log(p), -np.log(1 - p)], axis=1)
    expected = LogisticRegression(C=1e12, tol=1e-12, max_iter=10000).fit(features, positive.numpy())
    found = Beta.fit(logits, positive.long())
    np.testing.assert_allclose(found.coefficients[1, :2], expected.coef_[0], rtol=1e-3)
    # with two classes both one-vs-rest fits agree, and renormalising changes nothing
    after = found(logits).softmax(dim=-1)[:, 1].numpy()
    np.testing.assert_allclose(after, expected.predict_proba(features)[:, 1], atol=1e-4)


def test_beta_calibration_has_no_negative_slope():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=random)
    found = Beta.fit(-5 * logits, logits.argmax(dim=-1))  # probabilities that mean the opposite
    assert float(found.coefficients[:, :2].min()) >= 0


@pytest.mark.parametrize("kind", CALIBRATORS)
@pytest.mark.parametrize("loss", [CrossEntropy(), MSE(), NLL(), Exponential()], ids=lambda loss: loss.name)
def test_every_calibration_works_for_every_loss_and_survives_json(kind, loss):
    kept = sample()
    outputs = kept.outputs
    if loss.takes == "margins":
        outputs, kept = (
            outputs[..., :1] - outputs[..., 1:2],
            KeptOutputs(outputs, (kept.targets == 0).long(), kept.index),
        )
    elif loss.takes != "logits":
        outputs = outputs.softmax(dim=-1)
    kept = KeptOutputs(outputs, kept.targets, kept.index)
    plain = combiner(kept, loss=loss)
    calibration = fit_calibration(kind, False, plain, kept)
    again = Calibration.from_json(calibration.to_json(), loss)
    found = replace(plain, calibration=calibration).log_probabilities(kept)
    assert found.equal(replace(plain, calibration=again).log_probabilities(kept))
    torch.testing.assert_close(found.exp().sum(dim=-1), torch.ones(len(kept)).double())
    nll = torch.nn.functional.nll_loss
    assert nll(found, kept.targets) < nll(plain.log_probabilities(kept), kept.targets)


def test_calibrated_float32_outputs_stay_float32():
    kept = sample()
    for kind in CALIBRATORS:
        calibrated = replace(combiner(kept), calibration=fit_calibration(kind, False, combiner(kept), kept))
        assert calibrated.combine(kept.outputs.float()).dtype == torch.float32


def test_folds_are_seeded_disjoint_and_stratified():
    classes = torch.cat([torch.zeros(50), torch.ones(23), torch.full((7,), 2)]).long()
    folds = stratified_folds(classes, 5, seed=3)
    assert folds.equal(stratified_folds(classes, 5, seed=3))
    assert not folds.equal(stratified_folds(classes, 5, seed=4))
    assert sorted(folds.bincount().tolist()) == [16] * 5
    for label in range(3):
        counts = folds[classes == label].bincount(minlength=5)
        assert counts.max() - counts.min() <= 1


def test_a_sample_is_calibrated_by_a_fit_to_the_other_folds_alone():
    kept = sample(samples=100)
    found = cross_fitted("isotonic", False, combiner(kept), kept, seed=0)
    folds = stratified_folds(kept.targets, 5, seed=0)
    logits = kept.outputs.mean(dim=0)
    for fold in range(5):
        rest = folds != fold
        expected = Isotonic.fit(logits[rest], kept.targets[rest])(logits[~rest]).log_softmax(dim=-1)
        torch.testing.assert_close(found[~rest], expected, rtol=1e-9, atol=1e-9)


def test_cross_fitting_shows_that_a_fit_to_noise_gains_nothing():
    random = torch.Generator().manual_seed(0)
    kept = KeptOutputs(torch.randn(2, 120, CLASSES, generator=random), torch.arange(120) % CLASSES, torch.arange(120))
    nll = torch.nn.functional.nll_loss
    own = Isotonic.fit(kept.outputs.mean(dim=0), kept.targets)(kept.outputs.mean(dim=0)).log_softmax(dim=-1)
    crossed = cross_fitted("isotonic", False, combiner(kept), kept, seed=0)
    assert nll(own, kept.targets) < math.log(CLASSES) < nll(crossed, kept.targets)


def test_the_adaptive_error_is_that_of_bins_of_equal_mass():
    random = np.random.default_rng(0)
    p = random.dirichlet(np.ones(3), 200)
    y = random.integers(3, size=200)
    confidence, correct = p.max(axis=1), p.argmax(axis=1) == y
    order = confidence.argsort(kind="stable")
    parts = np.array_split(order, 15)
    expected = sum(len(part) * abs(correct[part].mean() - confidence[part].mean()) for part in parts) / 200
    assert float(adaptive_calibration_error(torch.tensor(p), torch.tensor(y))) == pytest.approx(expected)


def test_the_reliability_table_gives_the_expected_calibration_error():
    kept = sample()
    p = kept.outputs.mean(dim=0).softmax(dim=-1)
    rows = reliability_table(p, kept.targets)
    assert len(rows) == 15
    gap = sum(row.count * abs(row.accuracy - row.confidence) for row in rows if row.count) / len(kept)
    assert gap == pytest.approx(float(calibration_error(p, kept.targets)))
