"""The exact diversity term is unbounded as a reward; mode "bounded" of GNCL is not."""

from __future__ import annotations

import pytest
import torch
from helpers.commands import run
from torch import Tensor

import ensemblekit as ek

M, B, C = 4, 6, 3
LOSSES = ["cross_entropy", "gaussian_hinge", "exponential", "mse"]
SHARES = [0.1, 0.5, 1.0]


def draw(loss: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(M, B, C, generator=generator, dtype=torch.float64)
    target = torch.randint(C, (B,), generator=generator)
    return (outputs[..., :1], target.clamp_max(1)) if loss in ("gaussian_hinge", "exponential") else (outputs, target)


def value(mode: str, lam: float, outputs: Tensor, target: Tensor, loss: str, weights: Tensor | None = None) -> Tensor:
    return ek.objective({"name": "gncl", "mode": mode, "lambda": lam}, outputs, target, loss, weights)


def losses(outputs: Tensor, target: Tensor, loss: str) -> tuple[float, float]:
    """The mean loss of the members, and that of their mean."""
    parts = ek.decompose(outputs, target, loss)
    return parts.mean_member_loss.item(), parts.ensemble_loss.item()


@pytest.mark.parametrize("lam", SHARES)
@pytest.mark.parametrize("loss", ["cross_entropy", "gaussian_hinge"])
def test_members_that_move_apart_have_no_minimum_in_mode_exact(loss, lam):
    outputs, target = draw(loss)
    center = outputs.mean(0)
    apart = [value("exact", lam, center + t * (outputs - center), target, loss).item() for t in (1e2, 1e3, 1e4)]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < -1e4


@pytest.mark.parametrize("lam", SHARES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_bounded_objective_is_never_below_the_losses_that_it_bounds(loss, lam):
    # larger outputs would overflow the exponential loss itself
    scales = [1e-3, 1.0, 30.0] if loss == "exponential" else [1e-3, 1.0, 30.0, 1e4, 1e8]
    for seed in range(20):
        outputs, target = draw(loss, seed)
        for scale in scales:
            members, mean_output = losses(scale * outputs, target, loss)
            least = (1 - lam) * members + lam / 2 * mean_output
            bounded = value("bounded", lam, scale * outputs, target, loss).item()
            assert bounded >= least * (1 - 1e-12) - 1e-12
            assert bounded >= -1e-12


def test_the_bound_holds_with_sample_weights_of_another_method():
    outputs, target = draw("cross_entropy")
    weights = torch.rand(B, M, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round(decimals=0)
    table = ["bagging", {"name": "gncl", "mode": "bounded", "lambda": 1.0}]
    for scale in (1.0, 1e2, 1e4):
        assert ek.objective(table, scale * outputs, target, sample_weights=weights).item() >= 0


@pytest.mark.parametrize("lam", SHARES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_bounded_objective_equals_the_exact_one_for_members_close_to_each_other(loss, lam):
    outputs, target = draw(loss)
    center = outputs.mean(0)
    close = (center + 1e-2 * (outputs - center)).requires_grad_()
    exact, bounded = (value(mode, lam, close, target, loss) for mode in ("exact", "bounded"))
    torch.testing.assert_close(bounded, exact, rtol=0, atol=1e-15)
    gradients = [torch.autograd.grad(number, close)[0] for number in (exact, bounded)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("lam", SHARES)
def test_members_far_apart_still_learn_from_their_losses_and_the_ensembles(lam):
    outputs, target = draw("cross_entropy")
    center = outputs.mean(0)
    far = (center + 100 * (outputs - center)).requires_grad_()
    (gradient,) = torch.autograd.grad(value("bounded", lam, far, target, "cross_entropy"), far)
    members = ek.objective("independent", far, target)
    (expected,) = torch.autograd.grad((1 - lam) * members + lam / 2 * ek.objective("end_to_end", far, target), far)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert gradient.abs().sum() > 0.1


def test_descent_on_the_bounded_objective_lowers_the_loss_where_the_exact_one_diverges():
    found = {}
    for mode in ("exact", "bounded"):
        outputs, target = draw("cross_entropy")
        outputs = (3 * outputs).requires_grad_()
        optimizer = torch.optim.Adam([outputs], lr=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            value(mode, 1.0, outputs, target, "cross_entropy").backward()
            optimizer.step()
        found[mode] = ek.evaluate(outputs.detach(), target)
    assert found["exact"]["diversity"] > 10
    assert found["bounded"]["loss"] < 0.2
    assert found["exact"]["loss"] > 1
    assert found["bounded"]["accuracy"] == 1


@pytest.mark.parametrize("mode", ["upper", "bounded"])
def test_a_share_of_more_than_one_is_refused(mode):
    result = run("validate", "digits", "--set", f'method={{name = "gncl", mode = "{mode}", lambda = 1.5}}')
    assert result.exit_code == 2
    assert f'at most 1 in mode "{mode}"' in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("method", "loss", "warns"),
    [
        ('{name = "gncl", mode = "exact", lambda = 0.5}', "cross_entropy", True),
        ('{name = "gncl", mode = "exact", lambda = 0}', "cross_entropy", False),
        ('{name = "gncl", mode = "exact", lambda = 1}', "mse", False),
        ('{name = "gncl", mode = "exact", lambda = 1.5}', "mse", True),
        ('{name = "gncl", mode = "bounded", lambda = 0.5}', "cross_entropy", False),
        ('{name = "gncl", lambda = 0.5}', "cross_entropy", False),
        ('{name = "ncl", lambda = 1}', "mse", False),
        ('{name = "ncl", lambda = 1.5}', "mse", True),
    ],
)
def test_validate_notes_an_objective_without_a_minimum(method, loss, warns):
    settings = ("--set", f"method={method}", "--set", f"training.loss={loss}")
    result = run("validate", "digits", *settings)
    assert result.exit_code == 0
    assert ("has no minimum" in " ".join(result.stdout.split())) == warns


def test_inspect_says_that_the_exact_objective_has_no_minimum():
    assert "The exact objective has no minimum" in " ".join(run("inspect", "gncl").stdout.split())
