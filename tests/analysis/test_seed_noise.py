"""Deviations over seeds against the quantiles of Student's t and simulated coverage."""

from __future__ import annotations

import math

import pytest
import torch

from ensemblekit.analysis.bootstrap import difference_interval
from ensemblekit.analysis.seed_noise import PooledVariance, difference_deviations, student_t

stats = pytest.importorskip("scipy.stats")


def pooled(*values, same_seeds=False):
    return PooledVariance.of(values, same_seeds)


@pytest.mark.parametrize("freedom", [1, 4, 30])
def test_the_quantiles_are_those_of_students_t(freedom):
    values = student_t(freedom, 40_000)
    assert float(values.quantile(0.975)) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.06)


def test_one_run_in_each_group_tells_nothing_about_seeds():
    assert difference_deviations([0.1], [0.3], pooled([0.1], [0.3])) is None


def test_the_interval_is_that_of_welchs_test():
    a, b = [0.0, 1.0, 2.0, 4.0], [5.0, 6.0, 7.0]
    deviations = difference_deviations(a, b, pooled(a, b), resamples=40_000)
    interval = difference_interval(1.75, 6.0, deviations)
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    # a little wider: the degrees of freedom, 4.7, are rounded down
    assert expected.low - 0.3 < interval.low < expected.low + 0.05
    assert expected.high - 0.05 < interval.high < expected.high + 0.3


def test_the_interval_over_the_same_seeds_is_that_of_the_paired_test():
    a, b = [0.0, 5.0, -3.0, 1.0], [1.1, 5.8, -2.2, 2.3]
    deviations = difference_deviations(a, b, pooled(a, b), same_seeds=True, resamples=40_000)
    interval = difference_interval(sum(a) / 4, sum(b) / 4, deviations)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert interval.low == pytest.approx(expected.low, abs=0.03)
    assert interval.high == pytest.approx(expected.high, abs=0.03)


def test_two_seeds_borrow_the_variance_of_all_groups():
    groups = [[0.0, 2.0], [5.0, 7.0], [1.0, 3.0], [2.0, 4.0]]  # variance 2 each, 4 degrees of freedom together
    deviations = difference_deviations(groups[0], groups[1], pooled(*groups), resamples=40_000)
    assert float(deviations.quantile(0.975)) == pytest.approx(stats.t.ppf(0.975, 4) * math.sqrt(2), rel=0.04)


def test_two_seeds_that_vary_more_than_those_of_other_groups_keep_their_own_variance():
    calm, wild = [1.0, 1.0], [0.0, 20.0]
    shared = pooled(*([calm] * 8), wild)
    assert float(difference_deviations(wild, calm, shared).std()) > float(
        difference_deviations(calm, calm, shared).std()
    )


def test_the_variance_of_blocks_does_not_count_what_a_seed_does_to_all_groups():
    lucky = torch.tensor([0.0, 5.0, -3.0])
    groups = [(lucky + own).tolist() for own in (0.0, 1.0, 2.0)]
    assert pooled(*groups, same_seeds=True).variance == pytest.approx(0, abs=1e-12)
    assert pooled(*groups, same_seeds=True).freedom == 4
    assert pooled(*groups).variance > 10


@pytest.mark.parametrize(("num_seeds", "same_seeds"), [(2, False), (3, False), (3, True), (2, True)])
def test_intervals_cover_the_true_difference_as_often_as_they_say(num_seeds, same_seeds):
    random, covered = torch.Generator().manual_seed(11), 0
    for trial in range(400):
        common = 3 * torch.randn(num_seeds, generator=random, dtype=torch.float64) if same_seeds else 0
        values = [(common + torch.randn(num_seeds, generator=random, dtype=torch.float64)).tolist() for _ in range(4)]
        shared = PooledVariance.of(values, same_seeds)
        deviations = difference_deviations(values[0], values[1], shared, same_seeds, resamples=500, seed=trial)
        means = [sum(group) / num_seeds for group in values]
        covered += difference_interval(means[0], means[1], deviations).contains_zero
    assert covered / 400 >= 0.92
