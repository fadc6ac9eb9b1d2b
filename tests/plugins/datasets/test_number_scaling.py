"""Numbers are scaled as scikit-learn scales them, from values that JSON keeps, and monotonically everywhere."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from ensemblekit_datasets.number_scaling import QuantileNumber, number_from_json
from ensemblekit_datasets.table import Table
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import QuantileTransformer

from ensemblekit import DataError


def skewed(count: int = 600) -> np.ndarray:
    random = np.random.default_rng(2)
    values = random.lognormal(0, 2, count).round(2)  # rounded: many values occur more than once
    values[random.random(count) < 0.1] = 0.0
    return values


def test_quantile_scaling_is_that_of_scikit_learn():
    values, new = skewed(), np.concatenate([skewed()[:50], [-5.0, 0.0, 0.005, 1e6, np.nan]])
    number = QuantileNumber.fit("x", values)
    assert len(number.quantiles) == 20
    theirs = QuantileTransformer(n_quantiles=20, output_distribution="normal").fit(values[:, None])
    np.testing.assert_allclose(number.quantiles, theirs.quantiles_[:, 0], rtol=1e-12)
    for column in (values, new[:-1]):
        np.testing.assert_allclose(number.encode(column), theirs.transform(column[:, None]), atol=1e-5)
    assert number.encode(new)[-1] == 0  # a missing value is the median


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e30, 1e30) | st.integers(-3, 3).map(float), min_size=1, max_size=80),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=30),
)
def test_quantile_scaling_never_decreases_stays_in_bounds_and_survives_json(values, new):
    number = QuantileNumber.fit("x", np.array(values))
    assert number_from_json(json.loads(json.dumps(number.to_json()))) == number
    scaled = number.encode(np.sort(np.array(new)))[:, 0]
    assert (np.diff(scaled) >= 0).all()
    assert np.abs(scaled).max() <= 5.2


def test_a_scaled_value_is_shown_in_its_own_units():
    number = QuantileNumber.fit("x", skewed())
    for value in (0.5, 3.0, 20.0):
        assert float(number.decode(torch.from_numpy(number.encode(np.array([value])))[0])) == pytest.approx(
            value, rel=0.02
        )


def frame(count: int = 300) -> pandas.DataFrame:
    values = skewed(count)
    gaps = np.where(np.arange(count) % 10 == 0, np.nan, values)
    return pandas.DataFrame({"x": gaps, "constant": 7.0, "label": np.where(values > 1, "a", "b")})


def loaded(**parameters: Any) -> tuple[Any, np.ndarray]:
    splits = Table(target="label", **parameters).with_frames([frame()]).load(0)
    return splits, frame()["x"].to_numpy()[splits.indices["train"].numpy()]


def test_quantiles_are_those_of_the_training_rows_alone():
    splits, values = loaded(scaling="quantile")
    saved = json.loads(json.dumps(splits.preparation))["columns"]
    expected = np.nanquantile(values, np.linspace(0, 1, len(saved[0]["quantiles"])))
    np.testing.assert_allclose(saved[0]["quantiles"], expected)
    assert (splits.train[0][:, 1] == 0).all()  # of a constant column
    table = Table(target="label")
    assert torch.equal(
        table.prepare_frame(frame().iloc[splits.indices["test"]], {**splits.preparation}).inputs, splits.test[0]
    )
    assert float(table.describe_inputs(splits.test[0][:1], splits.preparation)[0]["constant"]) == 7


def test_numbers_can_stay_as_they_are_with_the_mean_for_missing_ones():
    splits, values = loaded(scaling="none")
    expected = np.where(np.isnan(values), np.nanmean(values), values)
    np.testing.assert_allclose(splits.train[0][:, 0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("quantiles", [[], [1.0], [2.0, 1.0], ["x", 1.0]])
def test_damaged_quantiles_are_no_traceback(quantiles):
    preparation = json.loads(json.dumps(loaded(scaling="quantile")[0].preparation))
    preparation["columns"][0]["quantiles"] = quantiles
    with pytest.raises(DataError, match="unexpected structure"):
        Table(target="label").prepare_frame(frame(), preparation)
