"""The estimators pass the checks of scikit-learn itself, with no expected failure."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from ensemblekit.sklearn import EnsembleClassifier, EnsembleRegressor

# few and small networks, and large steps: most of the time of a fit is then its own, not that of training
MODEL = {"name": "mlp", "hidden": [32], "batch_norm": False}
SMALL = {"model": MODEL, "members": 2, "epochs": 8, "optimizer": {"lr": 0.06}}


@parametrize_with_checks([EnsembleClassifier(**SMALL), EnsembleRegressor(**SMALL)])
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
