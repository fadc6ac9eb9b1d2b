"""The decomposition of the ensemble's loss, for all losses."""

from __future__ import annotations

import pytest
import torch
from helpers.loss_inputs import LOSSES, by_name, inputs
from helpers.toy_plugins import Huber

import ensemblekit as ek

M = 5


def members_of(loss, spread=1.0):
    outputs, target = inputs(loss)
    generator = torch.Generator().manual_seed(7)
    noise = spread * torch.randn(M, *outputs.shape, generator=generator, dtype=torch.float64)
    if loss.takes == "probabilities":
        return (outputs.log() + noise).softmax(-1), target
    return outputs + noise, target


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("loss", LOSSES, ids=by_name)
def test_the_terms_add_up_and_the_remainder_is_within_its_bound(loss, spread):
    outputs, target = members_of(loss, spread)
    parts = ek.decompose(outputs, target, loss.name)
    center = outputs.mean(dim=0)
    torch.testing.assert_close(parts.ensemble_loss, loss(center, target).mean())
    torch.testing.assert_close(parts.mean_member_loss, torch.stack([loss(h, target).mean() for h in outputs]).mean())
    total = parts.mean_member_loss - parts.diversity + parts.remainder
    torch.testing.assert_close(total, parts.ensemble_loss)
    assert parts.diversity > 0  # all five losses are convex
    assert parts.remainder.abs() <= parts.remainder_bound + 1e-12


@pytest.mark.parametrize("loss", LOSSES, ids=by_name)
def test_diversity_equals_the_trace_of_the_hessian_and_the_covariance(loss):
    outputs, target = members_of(loss)
    center = outputs.mean(dim=0)
    expected = []
    for n in range(len(target)):
        matrix = torch.autograd.functional.hessian(
            lambda z, n=n: loss(z.unsqueeze(0), target[n : n + 1]).sum(), center[n]
        )
        covariance = torch.cov(outputs[:, n].T, correction=0).reshape(matrix.shape)
        expected.append(0.5 * torch.trace(matrix @ covariance))
    torch.testing.assert_close(ek.decompose(outputs, target, loss.name).diversity, torch.stack(expected).mean())


def test_the_squared_error_leaves_no_remainder():
    outputs, target = members_of(LOSSES[0], spread=3.0)
    parts = ek.decompose(outputs, target, "mse")
    assert parts.remainder.abs().item() < 1e-12
    assert parts.remainder_bound == 0


def test_a_third_partys_loss_decomposes_without_a_bound():
    outputs = torch.randn(M, 4, 1, dtype=torch.float64)
    parts = ek.decompose(outputs, torch.zeros(4), Huber(delta=10.0))
    torch.testing.assert_close(parts.diversity, 0.5 * outputs.var(dim=0, correction=0).mean())
    assert parts.remainder_bound is None


def test_identical_members_have_no_diversity():
    outputs, target = inputs(LOSSES[2])
    parts = ek.decompose(outputs.expand(M, -1, -1), target)
    assert parts.diversity.item() == pytest.approx(0, abs=1e-30)
    assert parts.remainder.item() == pytest.approx(0, abs=1e-12)
