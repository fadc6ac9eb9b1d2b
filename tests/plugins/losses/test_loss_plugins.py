"""The losses of the plugins against torch's own, closed forms and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ensemblekit_losses.focal import Focal
from ensemblekit_losses.gaussian_nll import GaussianNLL
from ensemblekit_losses.quantile import Quantile
from pydantic import ValidationError
from scipy import stats
from sklearn.metrics import mean_pinball_loss
from torch.func import hessian, jacfwd

import ensemblekit as ek
from ensemblekit.core.label_losses import BCE
from ensemblekit.core.losses import CrossEntropy, Loss

SEED = torch.Generator().manual_seed(0)
M, B, C = 3, 6, 4
LOGITS = torch.randn(B, C, generator=SEED, dtype=torch.float64)
CLASSES = torch.randint(C, (B,), generator=SEED)
LABELS = torch.randint(2, (B, C), generator=SEED).double()
VALUES = torch.randn(B, 2, generator=SEED, dtype=torch.float64)

CASES: list[tuple[Loss, torch.Tensor]] = [
    (Focal(gamma=2.5), CLASSES),
    (BCE(), LABELS),
    (BCE(positive_weight=3.0), LABELS),
    (GaussianNLL(), VALUES),
]


def by_case(value: object) -> str:
    return value.name if isinstance(value, Loss) else ""


def test_focal_loss_with_gamma_zero_is_cross_entropy():
    torch.testing.assert_close(Focal(gamma=0)(LOGITS, CLASSES), CrossEntropy()(LOGITS, CLASSES))


def test_focal_loss_has_its_formula():
    p = LOGITS.softmax(-1)[torch.arange(B), CLASSES]
    torch.testing.assert_close(Focal(gamma=1.5)(LOGITS, CLASSES), -((1 - p) ** 1.5) * p.log())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_extreme_logits_and_its_derivatives_are_finite(gamma):
    logits = torch.tensor([[60.0, -60.0, 0.0], [-60.0, 60.0, 0.0]], requires_grad=True)
    losses = Focal(gamma=gamma)(logits, torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), logits)
    assert losses[0].item() == pytest.approx(0, abs=1e-12)
    assert losses[1].item() == pytest.approx(120)
    assert bool(gradient.isfinite().all())
    assert bool(second.isfinite().all())


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_bce_is_the_sum_of_torchs_over_the_labels(weight):
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        LOGITS, LABELS, reduction="none", pos_weight=torch.tensor(weight, dtype=torch.float64)
    )
    torch.testing.assert_close(BCE(positive_weight=weight)(LOGITS, LABELS), expected.sum(-1))


def test_bce_takes_labels_of_any_type():
    torch.testing.assert_close(BCE()(LOGITS, LABELS.bool()), BCE()(LOGITS, LABELS))
    torch.testing.assert_close(BCE()(LOGITS, LABELS.long()), BCE()(LOGITS, LABELS))


def test_bce_probabilities_have_an_inverse():
    torch.testing.assert_close(BCE().from_probabilities(BCE().probabilities(LOGITS)), LOGITS)


def test_gaussian_nll_equals_torchs():
    outputs = torch.cat([LOGITS[:, :2], LOGITS[:, 2:]], dim=-1)
    expected = torch.nn.functional.gaussian_nll_loss(
        outputs[:, :2], VALUES, outputs[:, 2:].exp(), reduction="none", eps=0
    )
    torch.testing.assert_close(GaussianNLL()(outputs, VALUES), expected.sum(-1))


def test_beta_nll_weights_samples_by_their_variance_without_learning_from_the_weight():
    outputs = LOGITS[:, :2].clone().requires_grad_()
    target, beta = VALUES[:, :1], 0.5
    (found,) = torch.autograd.grad(GaussianNLL(beta=beta)(outputs, target).sum(), outputs)
    (plain,) = torch.autograd.grad(GaussianNLL()(outputs, target).sum(), outputs)
    torch.testing.assert_close(found, plain * (beta * outputs[:, 1:]).exp().detach())
    # Seitzer et al. 2022: with beta = 1 the mean learns as from the squared error
    (full,) = torch.autograd.grad(GaussianNLL(beta=1)(outputs, target).sum(), outputs)
    torch.testing.assert_close(full[:, 0], (outputs[:, 0] - target[:, 0]).detach())
    assert not GaussianNLL(beta=beta).twice_differentiable
    assert GaussianNLL().twice_differentiable


def test_the_mixture_of_normal_distributions_has_the_moments_of_samples_from_it():
    outputs = torch.tensor([[[1.0, 0.0]], [[4.0, 1.0]], [[-2.0, -1.0]]], dtype=torch.float64)
    mean, log_variance = GaussianNLL().mixture(outputs)[0]
    draws = [stats.norm(m, math.exp(s / 2)).rvs(400_000, random_state=i) for i, (m, s) in enumerate(outputs[:, 0])]
    samples = np.concatenate(draws)
    assert float(mean) == pytest.approx(samples.mean(), abs=0.01)
    assert float(log_variance.exp()) == pytest.approx(samples.var(), rel=0.01)
    # METHODS: mean(e^s + m²) - mean(m)²
    m, s = outputs[:, 0, 0], outputs[:, 0, 1]
    assert float(log_variance.exp()) == pytest.approx(float((s.exp() + m**2).mean() - m.mean() ** 2))


def test_the_metrics_of_gaussian_nll_are_those_of_scipy():
    outputs, target = LOGITS[:, :2], VALUES[:, :1]
    metrics = GaussianNLL().metrics(outputs, target)
    normal = stats.norm(outputs[:, 0].numpy(), (outputs[:, 1] / 2).exp().numpy())
    y = target[:, 0].numpy()
    assert float(metrics["nll"]) == pytest.approx(-normal.logpdf(y).mean())
    low, high = normal.interval(0.9)
    assert float(metrics["interval_coverage"]) == pytest.approx(((low <= y) & (y <= high)).mean())
    assert float(metrics["interval_width"]) == pytest.approx((high - low).mean())
    # CRPS = ∫ (F(x) - 1{x ≥ y})² dx, here by the trapezoidal rule
    grid = np.linspace(-60, 60, 400_001)[:, None]
    gaps = torch.from_numpy((normal.cdf(grid) - (grid >= y)) ** 2)
    integral = torch.trapezoid(gaps, torch.from_numpy(grid), dim=0)
    assert float(metrics["crps"]) == pytest.approx(float(integral.mean()), abs=1e-4)


def test_the_pinball_loss_is_the_sum_of_scikit_learns_over_the_quantiles():
    loss = Quantile(quantiles=(0.1, 0.5, 0.7))
    outputs = torch.randn(B, 6, generator=SEED, dtype=torch.float64)
    parts = outputs.reshape(B, 3, 2)
    expected = sum(
        2 * mean_pinball_loss(VALUES, parts[:, index], alpha=quantile)  # it averages over the two values
        for index, quantile in enumerate(loss.quantiles)
    )
    assert float(loss(outputs, VALUES).mean()) == pytest.approx(expected)


def test_minimising_the_pinball_loss_gives_the_quantiles():
    values = torch.randn(4_000, 1, generator=SEED, dtype=torch.float64)
    loss, outputs = Quantile(), torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        loss(outputs.expand(len(values), 3), values).mean().backward()
        optimizer.step()
    expected = values.quantile(torch.tensor(loss.quantiles, dtype=torch.float64))
    torch.testing.assert_close(outputs.detach()[0], expected, atol=0.05, rtol=0)


def test_quantiles_are_averaged_over_members_and_sorted():
    outputs = torch.tensor([[[1.0, 2.0, 3.0]], [[5.0, 2.0, 1.0]]])
    assert Quantile().mixture(outputs).tolist() == [[2.0, 2.0, 3.0]]
    two_values = torch.tensor([[[9.0, 1.0, 5.0, 2.0, 7.0, 3.0]]])  # quantile by quantile, each of two values
    assert Quantile().mixture(two_values).tolist() == [[5.0, 1.0, 7.0, 2.0, 9.0, 3.0]]


@pytest.mark.parametrize(
    ("quantiles", "point"), [((0.1, 0.5, 0.9), 2.0), ((0.1, 0.9), 2.0), ((0.6, 0.7), 1.0), ((0.2, 0.3), 3.0)]
)
def test_the_point_prediction_is_the_median_or_between_its_neighbours(quantiles, point):
    outputs = (
        torch.tensor([[1.0, 2.0, 3.0]])[:, : len(quantiles)] if len(quantiles) == 3 else torch.tensor([[1.0, 3.0]])
    )
    assert Quantile(quantiles=quantiles).point(outputs).tolist() == [[point]]


@pytest.mark.parametrize("quantiles", [(), (0.5, 0.1), (0.5, 0.5), (0.0, 0.5)])
def test_quantiles_that_make_no_sense_are_refused(quantiles):
    with pytest.raises(ValidationError):
        Quantile(quantiles=quantiles)


@pytest.mark.parametrize(("loss", "target"), CASES, ids=by_case)
def test_second_derivatives_are_those_of_autograd(loss, target):
    directions = torch.randn(M, B, C, generator=SEED, dtype=torch.float64)
    form = loss.quadratic_form(LOGITS, target, directions)
    for b in range(B):
        matrix = hessian(lambda z, b=b: loss(z.unsqueeze(0), target[b : b + 1])[0])(LOGITS[b])
        torch.testing.assert_close(form[:, b], torch.einsum("mc,cd,md->m", directions[:, b], matrix, directions[:, b]))


@pytest.mark.parametrize(("loss", "target"), CASES, ids=by_case)
def test_third_derivatives_stay_within_their_bound(loss, target):
    end = LOGITS + torch.randn(B, C, generator=SEED, dtype=torch.float64)
    bound = loss.third_derivative_bound(LOGITS, end, target)
    if bound is None:
        return
    for b in range(B):
        third = jacfwd(hessian(lambda z, b=b: loss(z.unsqueeze(0), target[b : b + 1])[0]))
        for share in torch.linspace(0, 1, 5, dtype=torch.float64):
            assert float(third(LOGITS[b].lerp(end[b], share)).abs().max()) <= float(bound[b]) + 1e-12


@pytest.mark.parametrize(("loss", "target"), CASES[1:], ids=by_case)
def test_the_decomposition_holds_and_its_remainder_is_bounded(loss, target):
    outputs = LOGITS + 0.1 * torch.randn(M, B, C, generator=SEED, dtype=torch.float64)
    parts = ek.decompose(outputs, target, loss)
    assert parts.remainder_bound is not None
    assert abs(float(parts.remainder)) <= float(parts.remainder_bound)
    assert float(parts.ensemble_loss) == pytest.approx(
        float(parts.mean_member_loss - parts.diversity + parts.remainder), abs=1e-12
    )
