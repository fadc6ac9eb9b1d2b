"""Folds are of the same size, have every class in proportion, keep groups together and depend on the seed alone."""

from __future__ import annotations

import pytest
import torch

import ensemblekit as ek
from ensemblekit.data.folds import make_folds

CLASSES = torch.tensor([0] * 13 + [1] * 7 + [2] * 3)


def _counts(folds: torch.Tensor, classes: torch.Tensor, num_folds: int) -> torch.Tensor:
    return torch.stack([classes[folds == fold].bincount(minlength=3) for fold in range(num_folds)])


def test_folds_differ_by_at_most_one_sample_of_each_class_and_in_all() -> None:
    counts = _counts(make_folds(CLASSES, 4, ek.generator(0, "x")), CLASSES, 4)
    assert int((counts.amax(dim=0) - counts.amin(dim=0)).max()) <= 1
    assert int(counts.sum(dim=1).max() - counts.sum(dim=1).min()) <= 1


def test_folds_depend_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (make_folds(CLASSES, 4, ek.generator(seed, "x")) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_real_values_are_divided_whatever_they_are() -> None:
    values = torch.randn(11, 1)
    folds = make_folds(values, 3, ek.generator(0, "x"))
    assert sorted(folds.bincount().tolist()) == [3, 4, 4]
    assert torch.equal(folds, make_folds(-values, 3, ek.generator(0, "x")))


@pytest.mark.parametrize("seed", range(5))
def test_groups_stay_in_one_fold_and_classes_are_spread(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    groups = torch.randint(40, (400,), generator=source)
    classes = torch.randint(3, (400,), generator=source)
    folds = make_folds(classes, 5, ek.generator(seed, "x"), 7 * groups)
    for group in groups.unique():
        assert len(folds[groups == group].unique()) == 1
    counts = _counts(folds, classes, 5).double()
    assert bool(((counts / counts.sum(dim=0) - 0.2).abs() < 0.08).all())


def test_groups_of_one_class_each_fill_every_fold() -> None:
    groups = torch.arange(4).repeat_interleave(3)
    assert make_folds(groups, 4, ek.generator(0, "x"), groups).bincount().tolist() == [3, 3, 3, 3]


def test_too_few_samples_or_groups_are_named() -> None:
    with pytest.raises(ek.DataError, match="3 samples cannot be divided into 5 folds"):
        make_folds(torch.tensor([0, 1, 0]), 5, ek.generator(0, "x"))
    with pytest.raises(ek.DataError, match="2 groups of samples cannot be divided into 3 folds"):
        make_folds(torch.tensor([0, 1, 0, 1]), 3, ek.generator(0, "x"), torch.tensor([0, 0, 1, 1]))


class Grouped(ek.Dataset):
    """Samples of five groups."""

    def load(self, seed: int) -> ek.Splits:
        samples = torch.arange(30.0).reshape(30, 1), torch.arange(30) % 2
        info = ek.DataInfo("classification", (1,), 2)
        return ek.Splits(samples, samples, info, groups=torch.arange(30) // 6)


def test_groups_of_a_data_set_follow_its_samples_through_splits() -> None:
    train = ek.load_data(Grouped(folds=3, validation_fraction=0.2, limit_train=20), 0).train
    assert train.folds is not None
    assert train.indices is not None
    for group in (train.indices // 6).unique():  # some groups are held out for validation
        assert len(train.folds[train.indices // 6 == group].unique()) == 1
    assert len(train.folds.unique()) == 3
