"""Parts of a data set have its classes in proportion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ensemblekit as ek
from ensemblekit.core.errors import DataError
from ensemblekit.data.splitting import hold_out, limit


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes_of_sizes(*sizes: int) -> torch.Tensor:
    classes = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return classes[torch.randperm(len(classes), generator=generator(9))]


def test_limit_rounds_classes_by_the_largest_remainder() -> None:
    targets = classes_of_sizes(50, 30, 21)
    kept = limit(targets, 10, generator())
    # 4.95, 2.97 and 2.08: two places are left over, and go to the first two
    assert targets[kept].bincount().tolist() == [5, 3, 2]


def test_limit_beyond_the_data_keeps_all_of_it() -> None:
    assert limit(classes_of_sizes(2, 3), 99, generator()).tolist() == [0, 1, 2, 3, 4]


def test_hold_out_leaves_the_only_sample_of_a_class() -> None:
    targets = classes_of_sizes(1, 1, 1, 97)
    kept, held_out = hold_out(targets, 0.9, generator())
    assert targets[kept].unique().tolist() == [0, 1, 2, 3]
    assert len(held_out) == 90


def test_hold_out_of_classes_of_one_sample_each_says_that_they_are_too_few() -> None:
    with pytest.raises(DataError, match="3 samples are too few to hold any out"):
        hold_out(classes_of_sizes(1, 1, 1), 0.3, generator())


def test_parts_depend_on_the_seed_alone() -> None:
    targets = classes_of_sizes(40, 60)
    assert torch.equal(limit(targets, 20, generator(1)), limit(targets, 20, generator(1)))
    assert not torch.equal(limit(targets, 20, generator(1)), limit(targets, 20, generator(2)))


def test_real_targets_are_drawn_without_classes() -> None:
    kept, held_out = hold_out(torch.randn(50, 2), 0.2, generator())
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(50))
    assert len(held_out) == 10


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum), st.integers(1, 200))
def test_limited_classes_are_never_off_their_proportion_by_one(sizes: list[int], count: int) -> None:
    targets = classes_of_sizes(*sizes)
    kept = limit(targets, count, generator())
    wanted = min(count, len(targets))
    assert len(kept) == len(kept.unique()) == wanted
    exact = torch.tensor(sizes) * wanted / len(targets)
    assert bool(((targets[kept].bincount(minlength=len(sizes)) - exact).abs() < 1).all())


def test_a_split_seed_fixes_the_samples_of_runs_with_different_seeds():
    dataset = ek.datasets()["digits"].load()
    parts = {"limit_train": 60, "limit_test": 40}
    first, second = (ek.load_data(dataset(split_seed=7, **parts), seed) for seed in (1, 2))
    by_run = ek.load_data(dataset(**parts), 1)
    for name in ("train", "validation", "test"):
        assert torch.equal(getattr(first, name).inputs, getattr(second, name).inputs)
    assert not torch.equal(first.test.inputs, by_run.test.inputs)
    assert torch.equal(ek.load_data(dataset(**parts), 7).test.inputs, first.test.inputs)
