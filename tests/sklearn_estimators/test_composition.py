"""Estimators in pipelines, searches, cross-validation and calibration, with parameters of tables by name."""

from __future__ import annotations

import numpy as np
import pytest
from joblib import parallel_backend
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline

import ensemblekit as ek
from ensemblekit.core.errors import UsageError
from ensemblekit.sklearn import EnsembleClassifier, EnsembleRegressor
from ensemblekit.training.only_run import between_runs, only_run_of_process


def test_parameters_of_tables_are_set_by_their_path():
    estimator = EnsembleClassifier("gncl")
    table = {"name": "mlp", "hidden": [4]}
    estimator.set_params(method__lambda=0.3, optimizer__lr=0.1, model=table, model__dropout=0.5, engine__device="cpu")
    assert estimator.method == {"name": "gncl", "lambda": 0.3}
    assert estimator.optimizer == {"lr": 0.1}
    assert estimator.model == {"name": "mlp", "hidden": [4], "dropout": 0.5}
    assert estimator.engine == {"name": "auto", "device": "cpu"}
    assert table == {"name": "mlp", "hidden": [4]}
    estimator.set_params(model={"name": "swag", "model": "mlp"}, model__model__hidden=[2])
    assert estimator.model == {"name": "swag", "model": {"name": "mlp", "hidden": [2]}}
    params = estimator.get_params()
    assert (params["method__lambda"], params["model__model__hidden"]) == (0.3, [2])
    assert "method__lambda" not in estimator.get_params(deep=False)
    copied = clone(estimator)
    assert copied.get_params() == params
    assert copied.method is not estimator.method
    assert copied.set_params(**params).get_params() == params


def test_parameters_that_do_not_exist_are_refused():
    for wrong in ({"lambda": 1}, {"epochs__x": 1}, {"nonsense__lambda": 1}):
        with pytest.raises((ValueError, AttributeError)):
            EnsembleClassifier().set_params(**wrong)
    with pytest.raises(ValueError, match="only a name or a table has parameters"):
        EnsembleClassifier(model=ek.Model).set_params(model__width=1)


def test_a_pipeline_is_searched_and_its_best_parameters_are_used(small, flowers):
    steps = Pipeline([("axes", PCA(2)), ("ensemble", EnsembleClassifier("gncl", **small))])
    grid = {"ensemble__method__lambda": [0.0, 1.0], "ensemble__members": np.array([1, 2])}
    search = GridSearchCV(steps, grid, cv=2).fit(*flowers)
    assert len(set(search.cv_results_["mean_test_score"])) > 1
    best = search.best_estimator_.named_steps["ensemble"]
    assert best.ensemble_.spec.methods[0].lam == search.best_params_["ensemble__method__lambda"]
    assert len(best.ensemble_.members) == search.best_params_["ensemble__members"]


def test_cross_validation_in_threads_gives_the_same_numbers(small, patients):
    estimator = EnsembleRegressor(**small)
    expected = cross_val_score(estimator, *patients, cv=4)
    with parallel_backend("threading", n_jobs=4):
        found = cross_val_score(estimator, *patients, cv=4)
    np.testing.assert_array_equal(found, expected)
    assert expected.min() > 0


def test_a_fit_within_a_run_of_the_same_thread_is_an_error_and_loading_is_not(small, flowers, classifier):
    with only_run_of_process():
        with between_runs():
            pass
        with pytest.raises(UsageError, match="another run is being trained"):
            EnsembleClassifier(**small).fit(*flowers)


def test_probabilities_are_calibrated_by_cross_validation(small, flowers):
    inputs, names = flowers
    calibrated = CalibratedClassifierCV(EnsembleClassifier(**small), cv=2).fit(inputs, names)
    assert calibrated.score(inputs, names) > 0.7
    assert calibrated.predict_proba(inputs).shape == (150, 3)
