"""Real targets are standardised in float64 by the training samples, and never rounded without a word."""

from __future__ import annotations

import json

import pytest
import torch
from sklearn.preprocessing import StandardScaler

from ensemblekit import DataError, DataInfo, Dataset, Splits, TargetScaling, data_from_datasets, load_data

LARGE = 16_777_217.0


class Values(Dataset):
    """Real targets as they are given here."""

    def load(self, seed: int) -> Splits:
        return _splits(torch.tensor([[LARGE], [LARGE + 2], [LARGE + 4]], dtype=torch.float64))


class Samples:
    """A map-style data set of pairs."""

    def __init__(self, samples: list[tuple[torch.Tensor, float]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return self.samples[index]


def _splits(targets: torch.Tensor) -> Splits:
    part = (torch.arange(len(targets)).float()[:, None], targets)
    return Splits(part, part, DataInfo("regression", (1,), targets.shape[1]))


def pair(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(len(targets)).float()[:, None], targets


def test_targets_are_those_of_scikit_learns_scaler_fitted_on_the_training_samples():
    random = torch.Generator().manual_seed(5)
    train, test = (torch.randint(10**6, (count, 2), generator=random).double() for count in (50, 20))
    data = data_from_datasets(pair(train), pair(test), seed=0, validation_fraction=0.2)
    assert data.validation is not None
    assert data.target_scaling is not None
    fitted = data.target_scaling.restore(data.train.targets)  # the 40 samples that are not held out
    scaler = StandardScaler().fit(fitted.numpy())
    torch.testing.assert_close(data.test.targets, torch.tensor(scaler.transform(test.numpy())).float())
    assert data.test.targets.dtype == torch.float32
    held_out = data.target_scaling.restore(data.validation.targets)
    rows = {tuple(row) for row in torch.cat([fitted, held_out]).round().tolist()}
    assert rows == {tuple(row) for row in train.round().tolist()}


def test_neighbours_beyond_float32_stay_different():
    targets = LARGE + torch.arange(8, dtype=torch.float64)[:, None]
    data = data_from_datasets(pair(targets), pair(targets), seed=0, validation_fraction=0)
    assert len(data.test.targets.unique()) == 8
    assert data.target_scaling is not None
    assert data.target_scaling.restore(data.test.targets).round().equal(targets)


def test_lists_of_numbers_keep_their_digits():
    values = [LARGE + i for i in range(8)]
    samples = ([[float(i)] for i in range(8)], values)
    data = data_from_datasets(samples, samples, seed=0, validation_fraction=0)
    assert data.target_scaling is not None
    assert data.target_scaling.restore(data.test.targets).round().flatten().tolist() == values


def test_targets_that_float32_would_round_are_refused_unless_they_are_standardised():
    targets = LARGE + torch.arange(8, dtype=torch.float64)[:, None]
    with pytest.raises(
        DataError, match=r"(?s)float32 would round targets \(16777217 to 16777224\).*standardise_targets"
    ):
        data_from_datasets(pair(targets), pair(targets), seed=0, standardise_targets=False)
    with pytest.raises(DataError, match=r"Splits\(…, standardise_targets=True\)"):
        load_data(Values(validation_fraction=0), 0)


def test_rounding_that_is_small_against_the_spread_is_no_reason_to_refuse():
    targets = torch.linspace(0, 1e6, 50, dtype=torch.float64)[:, None]
    data = data_from_datasets(pair(targets), pair(targets), seed=0, validation_fraction=0, standardise_targets=False)
    assert data.target_scaling is None
    assert data.test.targets.equal(targets.float())


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9])
def test_a_constant_target_keeps_a_unit_of_one(value):
    scaling = TargetScaling.of(torch.full((30, 1), value, dtype=torch.float64))
    assert scaling.std == (1.0,)
    assert scaling.standardise(torch.tensor([value], dtype=torch.float64)).abs() < 1e-6


@pytest.mark.parametrize("standardise", [True, False])
def test_targets_beyond_all_bounds_are_named(standardise):
    train, test = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None], torch.full((3, 1), 1e300, dtype=torch.float64)
    with pytest.raises(DataError, match=r"(?s)target is too large: \[1e\+300\].*test"):
        data_from_datasets(pair(train), pair(test), seed=0, standardise_targets=standardise)


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_targets_of_data_sets_are_standardised_too(storage):
    samples = [(torch.tensor([float(i)]), LARGE + i) for i in range(10)]
    data = data_from_datasets(Samples(samples), Samples(samples), seed=0, validation_fraction=0, storage=storage)
    batch = next(data.test.batches(10))
    expected = (torch.arange(10.0) - 4.5) / torch.arange(10.0).std(correction=0)
    torch.testing.assert_close(batch.targets.flatten(), expected)
    assert batch.inputs.flatten().tolist() == list(range(10))


def test_classes_are_not_scaled():
    data = data_from_datasets(pair(torch.arange(10) % 2), pair(torch.arange(10) % 2), seed=0)
    assert data.target_scaling is None


def test_a_scaling_survives_json_bit_by_bit():
    scaling = TargetScaling.of(torch.arange(27, dtype=torch.float64).view(9, 3).sin() / 3)
    assert TargetScaling.from_json(json.loads(json.dumps(scaling.to_json()))) == scaling
    values = torch.arange(12, dtype=torch.float64).view(4, 3)
    torch.testing.assert_close(scaling.restore(scaling.standardise(values)), values)
