"""The bootstrap against closed forms, exact enumeration and simulated coverage."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ensemblekit.analysis.bootstrap import (
    SampleStatistic,
    centred_interval,
    difference_interval,
    mean_interval,
    resampled,
    resampled_shares,
)


def test_shares_are_those_of_samples_drawn_with_replacement():
    shares = torch.cat(list(resampled_shares(50, 400, seed=1)))
    assert shares.shape == (400, 50)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(400))
    counts = shares * 50
    assert torch.equal(counts, counts.round())
    # multinomial: each count has the mean 1 and the variance 1 - 1/N
    assert float(counts.var(dim=0).mean()) == pytest.approx(1 - 1 / 50, rel=0.03)


def test_chunks_do_not_change_what_is_resampled(monkeypatch):
    statistic = SampleStatistic(torch.randn(30, generator=torch.Generator().manual_seed(0)))
    whole = resampled([statistic], 64, seed=3)
    monkeypatch.setattr("ensemblekit.analysis.bootstrap.CHUNK_BYTES", 4 * 30 * 64 // 4)
    assert resampled([statistic], 64, seed=3).shape == whole.shape
    torch.testing.assert_close(resampled([statistic], 64, seed=3), whole)


def test_the_distribution_equals_the_exact_one_of_three_samples():
    values = torch.tensor([0.0, 1.0, 5.0])
    exact = torch.tensor([sum(draw) / 3 for draw in itertools.product(values.tolist(), repeat=3)])
    sampled = resampled([SampleStatistic(values)], 20_000)[:, 0]
    for point in exact.unique():
        probability = float((exact == point).double().mean())
        share = float(((sampled - point).abs() < 1e-5).double().mean())
        assert share == pytest.approx(probability, abs=4 * math.sqrt(probability / 20_000))


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5)) * 2 + 3
    interval = mean_interval(values, resamples=8000)
    error = float(values.std()) / math.sqrt(4000)
    assert interval.low == pytest.approx(float(values.mean()) - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(float(values.mean()) + 1.96 * error, abs=0.1 * error)


def test_the_paired_interval_covers_the_true_difference_as_often_as_it_says():
    random, covered, widths = torch.Generator().manual_seed(7), 0, []
    for trial in range(300):
        common = torch.randn(150, generator=random)  # what is hard for both
        first, second = (common + 0.3 * torch.randn(150, generator=random) + shift for shift in (0.2, 0.0))
        values = resampled([SampleStatistic(first), SampleStatistic(second)], 400, seed=trial)
        interval = difference_interval(float(first.mean()), float(second.mean()), values[:, 0] - values[:, 1])
        covered += interval.low <= 0.2 <= interval.high
        widths.append(interval.high - interval.low)
    assert 0.90 <= covered / 300 <= 0.985
    # unpaired, the width would be that of the common part too: 2 · 1.96 · √(2 · 1.09 / 150) = 0.47
    assert sum(widths) / 300 == pytest.approx(2 * 1.96 * 0.3 * math.sqrt(2 / 150), rel=0.1)


def test_a_biased_statistic_is_centred_at_its_estimate():
    random = torch.Generator().manual_seed(0)
    gaps = torch.randn(500, 15, generator=random) * 0.1
    statistic = SampleStatistic(gaps, lambda means: means.abs().sum(dim=-1))
    values = resampled([statistic], 1000)[:, 0]
    assert float(values.mean()) > 1.2 * statistic.value()  # resampling adds noise to every bin
    interval = centred_interval(statistic.value(), values)
    assert interval.low < statistic.value() < interval.high


def test_the_difference_of_identical_statistics_is_exactly_zero():
    rounding = 1e-9 * torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    interval = difference_interval(0.7, 0.7, rounding)
    assert (interval.low, interval.high) == (0.0, 0.0)
    assert interval.contains_zero
