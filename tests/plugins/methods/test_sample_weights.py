"""The weights that bagging and wagging draw once per run."""

from __future__ import annotations

import math

import pytest
import torch

import ensemblekit as ek

N, M = 20_000, 3


def draw(table: dict, members: int = M, seed: int = 0) -> torch.Tensor:
    weights = ek.draw_sample_weights(table, N, members, seed)
    assert weights is not None
    assert weights.shape == (N, members)
    return weights


def test_poisson_counts_have_the_distribution_of_poisson_1():
    weights = draw({"name": "bagging", "weights": "poisson"})
    for count in range(5):
        share = (weights == count).float().mean().item()
        assert share == pytest.approx(math.exp(-1) / math.factorial(count), abs=0.01)


def test_bootstrap_counts_are_of_n_draws_and_leave_out_a_share_of_1_over_e():
    weights = draw({"name": "bagging", "weights": "bootstrap"})
    assert weights.sum(dim=0).tolist() == [N] * M
    assert (weights == 0).float().mean().item() == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_subsample_is_a_fraction_without_repeats(fraction):
    weights = draw({"name": "bagging", "weights": "subsample", "fraction": fraction})
    assert set(weights.unique().tolist()) <= {0.0, 1.0}
    assert weights.sum(dim=0).tolist() == [fraction * N] * M


def test_exponential_weights_have_mean_and_deviation_1():
    weights = draw({"name": "wagging"})
    assert weights.min() >= 0
    assert weights.mean().item() == pytest.approx(1, abs=0.02)
    assert weights.std().item() == pytest.approx(1, abs=0.02)
    assert (weights > 2).float().mean().item() == pytest.approx(math.exp(-2), abs=0.01)


def test_gaussian_weights_are_clipped_at_zero():
    weights = draw({"name": "wagging", "weights": "gaussian", "sigma": 2.0})
    below = 0.5 * (1 + math.erf(-0.5 / math.sqrt(2)))  # P(1 + 2 N(0,1) < 0)
    assert (weights == 0).float().mean().item() == pytest.approx(below, abs=0.01)
    assert weights[weights > 0].min() > 0
    assert weights.median().item() == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("name", ["bagging", "wagging"])
def test_weights_are_a_function_of_the_seed_and_the_member_alone(name):
    table = {"name": name}
    first = draw(table)
    assert torch.equal(first, draw(table))
    assert not torch.equal(first, draw(table, seed=1))
    assert torch.equal(first, draw(table, members=M + 2)[:, :M])
    assert not torch.equal(first[:, 0], first[:, 1])


def test_weights_of_several_methods_multiply():
    both = ek.draw_sample_weights(["bagging", "wagging"], N, M)
    assert torch.equal(both, draw({"name": "bagging"}) * draw({"name": "wagging"}))


def test_methods_that_draw_no_weights_give_none():
    assert ek.draw_sample_weights("gncl", N, M) is None
