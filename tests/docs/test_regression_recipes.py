"""Recipes of the cookbook for regression: predicted variances and quantiles are those of the noise."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.recipes import data_of, load, plugin, train


def noisy_lines(path):
    """A file of y = x with noise of a standard deviation of 0.05 for x < 0 and of 1 for x > 0."""
    random = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(600, generator=random) - 1
    y = x + torch.where(x > 0, 1.0, 0.05) * torch.randn(600, generator=random)
    path.write_text("x,y\n" + "".join(f"{a:.6f},{b:.6f}\n" for a, b in zip(x.tolist(), y.tolist(), strict=True)))
    return {"name": "table", "path": str(path), "target": "y", "standardise_targets": True}


LONGER = {"epochs": 60, "evaluate_every": 60, "optimizer": {"name": "adam", "lr": 0.01}}


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_predicted_variance_is_that_of_the_noise_and_beats_a_constant_one(beta, tmp_path):
    tables = {"data": noisy_lines(tmp_path / "lines.csv"), "method": "gaussian_mixture"}
    loss = {"name": "beta_gaussian", "beta": beta}
    run = train("heteroscedastic", tmp_path / "run", LONGER | {"loss": loss}, **tables)
    ensemble, kept = load("heteroscedastic", run), run.outputs("test")
    inputs = data_of(run).inputs
    mean, log_variance = ensemble(inputs).double().unbind(dim=1)
    deviation, errors = (log_variance / 2).exp(), kept.targets[:, 0].double() - mean
    is_noisy = inputs[:, 0] > inputs[:, 0].mean()
    assert deviation[is_noisy].median() == pytest.approx(1, rel=0.4)  # in the units of the file
    assert deviation[~is_noisy].median() == pytest.approx(0.05, rel=1.0)
    constant = errors.square().mean()
    nll = 0.5 * (log_variance + errors.square() / deviation.square()).mean()
    assert nll < 0.5 * (constant.log() + 1) - 0.3
    assert run.metrics["test_mse"] == pytest.approx(float(constant), rel=1e-4)


def test_the_mixture_has_the_mean_and_the_variance_of_all_members_samples():
    mean, log_variance = torch.randn(2, 3, 4, 1, dtype=torch.float64)
    method = plugin("heteroscedastic", "gaussian_mixture")
    combined = method.combine({"mean": mean, "log_variance": log_variance})
    components = torch.distributions.Normal(mean[..., 0].T, (log_variance[..., 0].T / 2).exp())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(4, 3)), components)
    torch.testing.assert_close(combined[:, 0], mixture.mean)
    torch.testing.assert_close(combined[:, 1].exp(), mixture.variance)


def test_the_loss_of_a_mean_and_a_variance_is_the_likelihood_and_beta_scales_its_gradient():
    outputs, target = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(5, 1, dtype=torch.float64)
    likelihood = plugin("heteroscedastic", "beta_gaussian")(outputs, target)
    normal = torch.distributions.Normal(outputs[:, :1], (outputs[:, 1:] / 2).exp())
    torch.testing.assert_close(likelihood, -normal.log_prob(target)[:, 0] - 0.5 * math.log(2 * math.pi))
    (plain,) = torch.autograd.grad(likelihood.sum(), outputs)
    (scaled,) = torch.autograd.grad(
        plugin("heteroscedastic", "beta_gaussian", beta=1.0)(outputs, target).sum(), outputs
    )
    torch.testing.assert_close(scaled, plain * outputs[:, 1:].detach().exp())
    torch.testing.assert_close(scaled[:, :1], (outputs[:, :1] - target).detach())  # that of the squared error


def test_quantiles_cover_as_many_training_targets_as_they_say_and_follow_the_noise(tmp_path):
    tables = {"data": noisy_lines(tmp_path / "lines.csv")}
    run = train("quantile", tmp_path / "run", LONGER | {"loss": {"name": "pinball"}}, **tables)
    batch = data_of(run, "train")
    ensemble = load("quantile", run)
    low, median, high = ensemble(batch.inputs).unbind(dim=1)
    targets = ensemble.target_scaling.restore(batch.targets)[:, 0]
    covered = [float((targets <= quantile).double().mean()) for quantile in (low, median, high)]
    assert covered == pytest.approx([0.1, 0.5, 0.9], abs=0.06)
    is_noisy = batch.inputs[:, 0] > batch.inputs[:, 0].mean()
    assert (high - low)[is_noisy].median() > 5 * (high - low)[~is_noisy].median()
    assert torch.equal(ensemble.loss.point(ensemble(batch.inputs))[:, 0], median)


def test_the_pinball_loss_is_least_at_the_quantile():
    values = torch.arange(100, dtype=torch.float64)
    loss = plugin("quantile", "pinball", quantiles=(0.5, 0.8))
    candidates = torch.arange(100, dtype=torch.float64)
    losses = [loss(torch.stack([c, c]).expand(100, 2), values.unsqueeze(1)).mean() for c in candidates]
    at_half = plugin("quantile", "pinball", quantiles=(0.5,))
    halves = [at_half(c.expand(100, 1), values.unsqueeze(1)).mean() for c in candidates]
    torch.testing.assert_close(torch.stack(halves), torch.stack([(values - c).abs().mean() / 2 for c in candidates]))
    upper = torch.stack(losses) - torch.stack(halves)  # what is left is the loss of the quantile 0.8
    assert abs(int(upper.argmin()) - float(values.quantile(0.8))) <= 1
