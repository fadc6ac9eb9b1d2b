"""The weights that bagging and wagging draw once per run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import ensemblekit as ek
from ensemblekit.api import run_spec
from ensemblekit.testing import run_contract
from ensemblekit.testing.toy_run import toy_registry

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


class RareClasses(ek.Method):
    """Gives every class the same total weight."""

    formula = "mean over i of N / (K N_y) sum_m l(f_m(x_i), y_i) / M"

    @ek.hookimpl
    def sample_weights(self, num_samples, num_members, targets):
        counts = targets.bincount()
        weights = num_samples / (len(counts) * counts[targets].float())
        return weights[:, None].expand(num_samples, num_members)


def test_a_method_may_weight_samples_by_their_targets():
    targets = torch.tensor([0, 0, 0, 1])
    weights = ek.draw_sample_weights(RareClasses(), 4, 2, targets=targets)
    assert weights[:, 0].tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2])


def test_a_run_passes_its_training_targets_to_the_weights(tmp_path, monkeypatch):
    seen = []

    class Looks(ek.Method):
        """Remembers the targets that it is given."""

        @ek.hookimpl
        def sample_weights(self, targets):
            seen.append(targets)

    data = (torch.randn(20, 3), 1000 + torch.arange(20.0))
    tables = {"data": {"name": "given", "validation_fraction": 0}, "model": {"name": "mlp", "hidden": [4]}}
    spec = replace(ek.load_spec({**tables, "training": {"epochs": 1}}), methods=(Looks(),))
    registry = toy_registry(Looks(), spec.data, spec.model)
    run_spec(spec, registry, tmp_path / "run", data=ek.load_data(spec.data.of(data, data), 0))
    (targets,) = seen
    assert targets.device.type == "cpu"
    torch.testing.assert_close(targets.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)  # as the networks learn them
    torch.testing.assert_close(targets.std(correction=0), torch.tensor(1.0))


def test_the_kit_gives_targets_to_methods_that_name_them():
    for result in run_contract(RareClasses):
        assert result.passed, result
