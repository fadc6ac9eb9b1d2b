"""Small estimators, fitted once for all tests that only ask them."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_iris

from ensemblekit.sklearn import EnsembleClassifier, EnsembleRegressor

SMALL = {"model": {"name": "mlp", "hidden": [8]}, "members": 3, "epochs": 4, "optimizer": {"lr": 0.02}}


@pytest.fixture(scope="session")
def small():
    """Parameters of an estimator that is fitted in a fraction of a second."""
    return {**SMALL, "random_state": 0}


@pytest.fixture(scope="session")
def flowers():
    inputs, classes = load_iris(return_X_y=True)
    return inputs, np.array(["setosa", "versicolor", "virginica"])[classes]


@pytest.fixture(scope="session")
def patients():
    return load_diabetes(return_X_y=True)


@pytest.fixture(scope="session")
def classifier(small, flowers):
    return EnsembleClassifier(**small).fit(*flowers)


@pytest.fixture(scope="session")
def regressor(small, patients):
    return EnsembleRegressor(**small).fit(*patients)
