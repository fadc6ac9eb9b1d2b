"""Predictions, those of single members, and uncertainty, against formulas in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy
from sklearn.metrics import accuracy_score, r2_score

from ensemblekit.sklearn import EnsembleRegressor


def test_probabilities_are_those_of_the_mean_of_the_members_outputs(classifier, flowers):
    inputs, names = flowers
    outputs = classifier.ensemble_.member_outputs(classifier.prepare(inputs)).numpy()
    members = classifier.member_predict_proba(inputs)
    assert members.shape == (3, 150, 3)
    np.testing.assert_allclose(members, softmax(outputs, axis=-1), atol=1e-12)
    np.testing.assert_allclose(classifier.predict_proba(inputs), softmax(outputs.mean(axis=0), axis=-1), atol=1e-12)
    predicted = classifier.predict(inputs)
    assert set(predicted) <= {"setosa", "versicolor", "virginica"}
    assert classifier.score(inputs, names) == accuracy_score(names, predicted) > 0.6


def test_uncertainty_of_classes_is_entropy_in_two_parts(classifier, flowers):
    members = classifier.member_predict_proba(flowers[0])
    found = classifier.uncertainty(flowers[0])
    np.testing.assert_allclose(found.total, entropy(members.mean(axis=0), axis=-1))
    np.testing.assert_allclose(found.aleatoric, entropy(members, axis=-1).mean(axis=0))
    np.testing.assert_allclose(found.epistemic, found.total - found.aleatoric, atol=1e-12)
    assert found.epistemic.min() >= 0
    assert found.epistemic.max() > 1e-4


def test_a_regressor_predicts_the_mean_of_its_members_in_the_units_of_the_targets(regressor, patients):
    inputs, values = patients
    members = regressor.member_predict(inputs)
    assert members.shape == (3, 442)
    np.testing.assert_allclose(regressor.predict(inputs), members.mean(axis=0))
    assert regressor.score(inputs, values) == pytest.approx(r2_score(values, members.mean(axis=0)))
    assert regressor.score(inputs, values) > 0.2
    found = regressor.uncertainty(inputs)
    np.testing.assert_allclose(found.epistemic, members.std(axis=0))
    np.testing.assert_array_equal(found.total, found.epistemic)
    assert np.isnan(found.aleatoric).all()


def test_a_loss_with_a_variance_tells_the_noise_of_the_data(small):
    generator = np.random.RandomState(0)
    inputs = generator.uniform(-1, 1, (400, 1))
    noise = np.where(inputs[:, 0] > 0, 20.0, 2.0)
    values = 1000 + generator.normal(scale=noise)
    estimator = EnsembleRegressor(**{**small, "epochs": 25}, loss="gaussian_nll").fit(inputs, values)
    found = estimator.uncertainty([[-0.5], [0.5]])
    assert found.aleatoric[0] < 6 < 12 < found.aleatoric[1] < 40
    np.testing.assert_allclose(found.total**2, found.aleatoric**2 + found.epistemic**2)


def test_several_values_are_predicted_at_once(small, patients):
    inputs, values = patients
    both = np.stack([values, -3 * values + 5], axis=1)
    estimator = EnsembleRegressor(**small).fit(inputs, both)
    predicted = estimator.predict(inputs)
    assert predicted.shape == both.shape
    assert estimator.member_predict(inputs).shape == (3, 442, 2)
    assert estimator.uncertainty(inputs).total.shape == both.shape
    assert min(np.corrcoef(predicted[:, index], both[:, index])[0, 1] for index in (0, 1)) > 0.5


def test_a_prediction_does_not_depend_on_the_other_rows(classifier, regressor, flowers, patients):
    for predict, inputs in ((classifier.predict_proba, flowers[0]), (regressor.predict, patients[0])):
        alone = np.concatenate([predict(inputs[index : index + 1]) for index in range(40)])
        np.testing.assert_allclose(predict(inputs)[:40], alone, rtol=1e-12, atol=1e-12)


def test_large_inputs_are_predicted_in_batches(classifier, flowers, monkeypatch):
    expected = classifier.member_predict_proba(flowers[0])
    monkeypatch.setattr("ensemblekit.sklearn.estimator.BATCH_BYTES", 4 * 4 * 7)
    np.testing.assert_allclose(classifier.member_predict_proba(flowers[0]), expected, rtol=1e-12)
