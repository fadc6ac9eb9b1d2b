"""The embedded digits are scikit-learn's."""

from __future__ import annotations

import torch
from ensemblekit_datasets.digits import Digits
from sklearn.datasets import load_digits

from ensemblekit import load_data


def test_digits_are_those_of_scikit_learn_scaled_to_the_unit_interval() -> None:
    splits, original = Digits().load(0), load_digits()
    images = torch.cat([splits.train[0], splits.test[0]]).flatten(1)
    labelled = torch.cat([images, torch.cat([splits.train[1], splits.test[1]]).unsqueeze(1)], dim=1)
    expected = torch.cat([torch.tensor(original.data) / 16, torch.tensor(original.target).unsqueeze(1)], dim=1)
    assert images.dtype == torch.float32
    assert sorted(labelled.double().tolist()) == sorted(expected.tolist())


def test_the_split_is_fixed_and_a_fifth_of_every_class_is_for_testing() -> None:
    first, other = Digits().load(0), Digits().load(1)
    assert torch.equal(first.test[0], other.test[0])
    in_training, in_test = (targets.bincount() for _, targets in (first.train, first.test))
    assert int(in_training.sum() + in_test.sum()) == 1797
    assert torch.equal(in_test, (in_training + in_test) // 5)


def test_the_shape_is_known_before_loading() -> None:
    for parameters in ({}, {"size": 16}, {"crop_size": 6}, {"size": 16, "crop_size": 12}):
        digits = Digits(**parameters)
        data = load_data(digits, 0)
        assert data.info == digits.info
        assert next(data.train.training_batches(4, 0, 0)).inputs.shape[1:] == digits.info.input_shape
        assert data.classes == tuple("0123456789")
