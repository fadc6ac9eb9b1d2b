"""Metrics of the normal distribution that an ensemble predicts: against scipy and numeric integrals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ensemblekit_metrics.crps import CRPS
from ensemblekit_metrics.interval_coverage import IntervalCoverage
from ensemblekit_metrics.normal_nll import NormalNLL
from helpers.probabilistic_losses import NormalNLL as GaussianLoss
from scipy import integrate, stats
from sklearn.metrics import mean_absolute_error

import ensemblekit as ek
from ensemblekit.core.losses import MSE
from ensemblekit.core.metrics import evaluate


def samples(members: int = 4, targets: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(members, 50, targets, generator=generator, dtype=torch.float64)
    return outputs, torch.randn(50, targets, generator=generator, dtype=torch.float64)


def normal(outputs: torch.Tensor):
    return stats.norm(outputs.mean(dim=0).numpy(), outputs.std(dim=0, correction=0).numpy())


def test_the_likelihood_is_that_of_scipy():
    outputs, target = samples()
    value = NormalNLL().compute(outputs, outputs.mean(dim=0), target, MSE())
    assert float(value) == pytest.approx(-normal(outputs).logpdf(target.numpy()).mean())


def test_the_score_is_the_integral_of_the_squared_distance_of_the_distributions():
    outputs, target = samples(targets=1)
    distribution = normal(outputs)
    scores = []
    for index in range(8):
        mean, deviation, y = distribution.mean()[index, 0], distribution.std()[index, 0], float(target[index])
        below = integrate.quad(lambda x: stats.norm.cdf(x, mean, deviation) ** 2, -20, y, epsabs=1e-11)[0]  # noqa: B023
        above = integrate.quad(lambda x: stats.norm.sf(x, mean, deviation) ** 2, y, 20, epsabs=1e-11)[0]  # noqa: B023
        scores.append(below + above)
    value = CRPS().compute(outputs[:, :8], outputs[:, :8].mean(dim=0), target[:8], MSE())
    assert float(value) == pytest.approx(np.mean(scores), rel=1e-7)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_the_coverage_counts_the_targets_in_scipys_interval(level):
    outputs, target = samples()
    low, high = normal(outputs).interval(level)
    expected = ((target.numpy() >= low) & (target.numpy() <= high)).mean()
    value = IntervalCoverage(level=level).compute(outputs, outputs.mean(dim=0), target, MSE())
    assert float(value) == pytest.approx(expected)


def test_a_well_specified_distribution_is_covered_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 20000, 1, generator=generator)
    outputs = torch.cat([outputs[:1] + 1, outputs[:1] - 1])  # deviation 1 about the mean
    target = outputs.mean(dim=0) + torch.randn(20000, 1, generator=generator)
    value = IntervalCoverage(level=0.8).compute(outputs, outputs.mean(dim=0), target, MSE())
    assert float(value) == pytest.approx(0.8, abs=0.01)


def test_members_own_variances_are_added_to_that_of_their_means():
    means, target = samples()
    log_variances = samples()[0].flip(0)
    outputs = torch.cat([means, log_variances], dim=-1)
    loss = GaussianLoss()
    variance = means.var(dim=0, correction=0) + log_variances.exp().mean(dim=0)
    expected = -stats.norm(means.mean(dim=0).numpy(), variance.sqrt().numpy()).logpdf(target.numpy()).mean()
    value = NormalNLL().compute(outputs, outputs.mean(dim=0), target, loss)
    assert float(value) == pytest.approx(expected)
    # the mixture: mean of e^s + m², minus the squared mean
    mixture = (log_variances.exp() + means.square()).mean(dim=0) - means.mean(dim=0).square()
    torch.testing.assert_close(mixture, variance)


def test_a_single_member_has_the_absolute_error_as_its_score_and_no_likelihood():
    outputs, target = samples(members=1)
    found = evaluate(outputs, target, MSE(), extra=[CRPS().named("crps"), NormalNLL().named("normal_nll")])
    assert found["crps"] == pytest.approx(mean_absolute_error(target, outputs[0]))
    assert "normal_nll" not in found


def test_members_that_agree_exactly_have_a_finite_likelihood():
    outputs, target = samples()
    same = outputs[:1].expand(3, -1, -1)
    for truth in (target, torch.zeros_like(target)):
        assert bool(NormalNLL().compute(same, same[0], truth, MSE()).isfinite())


def test_they_are_in_the_original_units_in_a_run(tmp_path):
    spec = {
        "metrics": ["crps", "normal_nll", {"name": "interval_coverage", "level": 0.5}],
        "model": {"name": "mlp", "hidden": [4]},
        "ensemble": {"members": 3},
        "training": {"epochs": 1, "loss": "mse"},
        "engine": {"name": "sequential"},
    }
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    run = ek.train(spec, tmp_path / "run", data=(inputs, 100 * inputs.sum(dim=1) + 500), progress=False)
    assert "test_standardised_mse" in run.metrics
    kept = run.outputs("test")
    distribution = normal(kept.outputs.double())
    expected = -distribution.logpdf(kept.targets.numpy()).mean()
    assert run.metrics["test_normal_nll"] == pytest.approx(expected, rel=1e-3)
    low, high = distribution.interval(0.5)
    inside = (kept.targets.numpy() >= low) & (kept.targets.numpy() <= high)
    assert run.metrics["test_interval_coverage"] == pytest.approx(inside.mean())
    assert 10 < run.metrics["test_crps"] < run.metrics["test_mae"]
