"""Fitted estimators are copied, pickled and dumped by joblib, with their weights as safetensors."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import joblib
import numpy as np
import pytest
from safetensors.torch import load
from torch import nn

import ensemblekit as ek
from ensemblekit.sklearn import EnsembleClassifier


def test_copies_predict_the_same_bits(classifier, regressor, flowers, patients, tmp_path):
    for estimator, inputs in ((classifier, flowers[0]), (regressor, patients[0])):
        expected = estimator.predict(inputs), estimator.uncertainty(inputs)
        joblib.dump(estimator, tmp_path / "estimator.joblib")
        copies = (
            pickle.loads(pickle.dumps(estimator)),
            copy.deepcopy(estimator),
            joblib.load(tmp_path / "estimator.joblib"),
            joblib.load(tmp_path / "estimator.joblib", mmap_mode="r"),
        )
        for other in copies:
            np.testing.assert_array_equal(other.predict(inputs), expected[0])
            np.testing.assert_array_equal(other.uncertainty(inputs), expected[1])
            assert other.get_params() == estimator.get_params()
            assert other.history_ == estimator.history_


def test_a_pickle_has_the_weights_as_safetensors_and_the_spec_as_json(classifier):
    spec, weights = classifier.__getstate__()["ensemble_"]
    assert json.loads(spec)["ensemble"]["members"] == 3
    tensors = load(weights)
    assert tensors["members.2.1.weight"].shape == (8, 4)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float32", "torch.int64"}
    assert b"torch" not in pickle.dumps(classifier).replace(weights, b"").replace(b"pytorch", b"")
    assert classifier.ensemble_ is not None  # asking for the state changes nothing


def test_an_estimator_holds_no_threads(classifier, flowers):
    before = set(threading.enumerate())
    estimator = copy.deepcopy(classifier).set_params(n_jobs=2)
    np.testing.assert_array_equal(estimator.predict_proba(flowers[0]), classifier.predict_proba(flowers[0]))
    assert set(threading.enumerate()) == before


class TwoLayers(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_shape[0], 8), nn.Tanh(), nn.Linear(8, num_outputs))

    def forward(self, inputs):
        return self.layers(inputs)


class Squared(ek.Method):
    """Weights the loss of each member by its square."""

    @ek.hookimpl
    def member_loss(self, outputs, target, loss, num_members):
        return loss(outputs, target) ** 2 / num_members


def test_networks_and_methods_of_ones_own_are_pickled_by_reference(small, flowers):
    inputs, names = flowers
    own = {**small, "model": TwoLayers, "method": "squared", "plugins": [Squared]}
    estimator = EnsembleClassifier(**own).fit(inputs, names)
    expected = estimator.predict_proba(inputs)
    estimator.set_params(model="mlp", plugins=())  # for the next fit
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(estimator)).predict_proba(inputs), expected)
    plain = EnsembleClassifier(**{**small, "model": TwoLayers}).fit(inputs, names).predict_proba(inputs)
    assert np.abs(plain - expected).max() > 1e-3


def test_a_method_that_remembers_and_a_fitted_combiner_are_pickled(small, flowers):
    inputs, names = flowers
    for method, more in (("adaboost", {}), ("stacking", {"validation_fraction": 0.2})):
        estimator = EnsembleClassifier(method, **small, **more).fit(inputs, names)
        copied = pickle.loads(pickle.dumps(estimator))
        np.testing.assert_array_equal(copied.predict_proba(inputs), estimator.predict_proba(inputs))


def test_an_unfitted_estimator_is_pickled_too():
    with pytest.raises(Exception, match="not fitted"):
        pickle.loads(pickle.dumps(EnsembleClassifier("gncl"))).predict([[1.0]])
