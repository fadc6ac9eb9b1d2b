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


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=40), st.integers(1, 4), st.floats(0.05, 0.6), st.integers(0, 9)
)
def test_groups_are_never_divided_and_every_class_keeps_a_sample(sizes, num_classes, fraction, seed) -> None:
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * 7 + 3
    targets = torch.randint(num_classes, (len(groups),), generator=generator(seed))
    try:
        kept, held_out = hold_out(targets, fraction, generator(seed), groups)
    except DataError:
        # the only excuse: every group has all samples of some class
        only = {c for c in targets.unique().tolist() if len(groups[targets == c].unique()) == 1}
        assert all(only & set(targets[groups == group].tolist()) for group in groups.unique())
        return
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(len(groups)))
    assert len(held_out)
    assert not set(groups[kept].tolist()) & set(groups[held_out].tolist())
    assert set(targets[kept].tolist()) == set(targets.tolist())


def test_many_small_groups_have_the_share_and_the_proportions_of_classes() -> None:
    targets = classes_of_sizes(700, 250, 50)
    groups = torch.randint(200, (1000,), generator=generator(4))
    chosen = [hold_out(targets, 0.2, generator(seed), groups)[1] for seed in range(5)]
    for held_out in chosen:
        assert targets[held_out].bincount().tolist() == pytest.approx([140, 50, 10], rel=0.1, abs=3)
    assert len({tuple(held_out.tolist()) for held_out in chosen}) == 5


def test_groups_larger_than_the_share_are_held_out_whole_the_smallest_error_first() -> None:
    groups = torch.tensor([0] * 50 + [1] * 30 + [2] * 40)
    held_out = hold_out(torch.randn(120), 0.1, generator(), groups)[1]
    assert groups[held_out].unique().tolist() == [1]
    assert len(held_out) == 30


def test_one_group_cannot_be_divided() -> None:
    with pytest.raises(DataError, match="1 groups are too few"):
        hold_out(torch.randn(10), 0.2, generator(), torch.zeros(10, dtype=torch.int64))
