"""The embedded diabetes data are scikit-learn's, standardised by the training part."""

from __future__ import annotations

import numpy as np
import torch
from ensemblekit_datasets.diabetes import Diabetes
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

from ensemblekit import load_data


def test_inputs_and_targets_are_standardised_by_the_training_part() -> None:
    splits = Diabetes().load(0)
    for values in splits.train:
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]), atol=1e-5, rtol=0)
    assert float(splits.test[1].mean().abs()) > 1e-3


def test_the_split_is_fixed_and_a_fifth_is_for_testing() -> None:
    first, other = Diabetes().load(0), Diabetes().load(1)
    assert torch.equal(first.test[0], other.test[0])
    assert (len(first.train[0]), len(first.test[0])) == (354, 88)


def test_a_linear_regression_explains_as_much_as_on_scikit_learns_own_data() -> None:
    inputs, targets = load_diabetes(return_X_y=True)
    rows = np.arange(442) % 5 == 4
    expected = LinearRegression().fit(inputs[~rows], targets[~rows]).score(inputs[rows], targets[rows])
    splits = Diabetes().load(0)
    model = LinearRegression().fit(*(values.numpy() for values in splits.train))
    assert abs(model.score(*(values.numpy() for values in splits.test)) - expected) < 1e-4


def test_the_shape_is_known_before_loading() -> None:
    data = load_data(Diabetes(), 0)
    batch = next(data.train.training_batches(32, 0, 0))
    assert data.info == Diabetes().info
    assert (batch.inputs.shape, batch.targets.shape) == ((32, 10), (32, 1))
