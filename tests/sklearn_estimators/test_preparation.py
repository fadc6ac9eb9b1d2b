"""Frames of pandas and polars: categories, missing values and the names of columns."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer, StandardScaler

from ensemblekit.sklearn import EnsembleClassifier

SIZES = ["small", "large", None, "medium"]


def make_frame(library):
    generator = np.random.RandomState(0)
    columns = {
        "length": np.where(np.arange(80) % 9 == 4, np.nan, generator.normal(5, 3, 80)),
        "count": [None if index % 7 == 3 else index % 5 for index in range(80)],
        "size": [SIZES[index % 4] for index in range(80)],
        "is_new": [index % 3 == 0 for index in range(80)],
        "colour": [["red", "blue"][index % 2] for index in range(80)],
    }
    if library is pl:
        return pl.DataFrame(columns).with_columns(pl.col("colour").cast(pl.Categorical))
    frame = pd.DataFrame(columns).astype({"count": "Int64", "colour": "category"})
    frame["size"] = frame["size"].astype(object)
    return frame


def targets(frame):
    return np.array(["no", "yes"])[np.asarray(frame["is_new"]).astype(int)]


@pytest.fixture(scope="module", params=[pd, pl], ids=["pandas", "polars"])
def frame(request):
    return make_frame(request.param)


@pytest.fixture(scope="module")
def fitted(frame, small):
    return EnsembleClassifier(**{**small, "epochs": 10}).fit(frame, targets(frame))


def test_columns_are_imputed_scaled_and_encoded(fitted, frame):
    """Against transformers of scikit-learn that are told which columns are which."""
    pandas = make_frame(pd)
    pandas["count"] = pandas["count"].astype("float64")
    numbers = ["length", "count", "is_new"]
    expected = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), numbers),
        (OneHotEncoder(sparse_output=False), ["size", "colour"]),
    ).fit_transform(pandas.astype({"is_new": float}))
    found = fitted.prepare(frame)
    assert found.shape == (80, 9)
    np.testing.assert_allclose(np.sort(found, axis=1), np.sort(expected, axis=1), atol=1e-5)
    np.testing.assert_allclose(found[:, :3], expected[:, :3], atol=1e-5)


def test_columns_are_checked_by_name_and_order(fitted, frame):
    names = list(frame.columns)
    assert list(fitted.feature_names_in_) == names
    assert fitted.n_features_in_ == 5
    assert fitted.score(frame, targets(frame)) > 0.9
    with pytest.raises(ValueError, match="same order"):
        fitted.predict(frame[names[::-1]])
    with pytest.raises(ValueError, match=r"now missing:\n- colour"):
        fitted.predict(frame[names[:-1]])
    with pytest.warns(UserWarning, match="valid feature names"), pytest.raises(ValueError, match="frame"):
        fitted.predict(np.zeros((2, 5)))


def test_a_category_that_is_new_is_encoded_as_zeros(fitted):
    frame = make_frame(pd).assign(size="huge", colour="green")
    np.testing.assert_array_equal(fitted.prepare(frame)[:, 3:], np.zeros((80, 6)))


def test_columns_that_cannot_be_used_are_named(frame, small):
    estimator = EnsembleClassifier(**small)
    pandas, classes = make_frame(pd), targets(frame)
    with pytest.raises(ValueError, match='"day" has dates'):
        estimator.fit(pandas.assign(day=pd.Timestamp("2020-02-02")), classes)
    with pytest.raises(ValueError, match='"day" has dates'):
        estimator.fit(pl.from_pandas(pandas).with_columns(day=pl.date(2020, 2, 2)), classes)
    with pytest.raises(ValueError, match="length contains infinity"):
        estimator.fit(pandas.assign(length=np.inf), classes)
    with pytest.raises(ValueError, match=r"1 sample\(s\)"):
        estimator.fit(pandas[:1], classes[:1])
    with pytest.raises(ValueError, match=r"0 feature\(s\)"):
        estimator.fit(pandas[[]], classes)
    identifiers = pd.DataFrame({"key": [f"row {index}" for index in range(1001)]})
    with pytest.raises(ValueError, match='"key" has 1,001 categories'):
        estimator.fit(identifiers, np.arange(1001) % 2)
    with pytest.raises(ValueError, match=r"unique column names|same name"):
        estimator.fit(pd.concat([pandas, pandas], axis=1), classes)
    with pytest.raises(ValueError, match='column "count" had only numbers'):
        estimator.set_params(epochs=1).fit(pandas, classes).predict(pandas.assign(count="many"))


def test_missing_numbers_of_an_array_are_imputed(small, flowers):
    inputs, names = flowers[0].copy(), flowers[1]
    inputs[::5, 1] = np.nan
    estimator = EnsembleClassifier(**small).fit(inputs, names)
    mean = np.nanmean(inputs[:, 1])
    expected = estimator.predict_proba(np.where(np.isnan(inputs), mean, inputs))
    np.testing.assert_allclose(estimator.predict_proba(inputs), expected, rtol=1e-12)


def test_scaling_is_chosen(small, flowers):
    inputs, names = flowers
    plain = EnsembleClassifier(**small, scaling=None).fit(inputs, names)
    np.testing.assert_array_equal(plain.prepare(inputs), inputs.astype(np.float32))
    quantile = EnsembleClassifier(**small, scaling="quantile").fit(inputs, names)
    expected = QuantileTransformer(n_quantiles=150, output_distribution="normal").fit_transform(inputs)
    np.testing.assert_allclose(quantile.prepare(inputs), expected, atol=1e-6)
