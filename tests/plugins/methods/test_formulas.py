"""Every method's objective and its gradient, against the formulas written a second time in float64."""

from __future__ import annotations

import pytest
import torch
from helpers import formulas
from helpers.plain_methods import plain_methods
from torch import Tensor

import ensemblekit as ek

M, B, C = 4, 5, 3
SHRINKAGE = 0.3


def draw(loss: str, members: int = M, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and targets that the loss can take."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, B, C, generator=generator, dtype=torch.float64)
    target = torch.randint(C, (B,), generator=generator)
    if loss == "nll":
        outputs = outputs.softmax(dim=-1)
    if loss in ("exponential", "gaussian_hinge"):
        outputs, target = outputs[..., :1], target.clamp_max(1)
    return outputs.requires_grad_(), target


def cases():
    for name, loss in formulas.LOSSES.items():
        yield {"name": "independent"}, name, formulas.independent(loss)
        yield {"name": "end_to_end"}, name, formulas.end_to_end(loss)
        for lam in (0, 0.3, 1):
            yield {"name": "gncl", "lambda": lam}, name, formulas.gncl_upper(loss, lam)
        for lam in (0, 0.5, 1, 2.5):
            yield {"name": "gncl", "mode": "exact", "lambda": lam}, name, formulas.gncl_exact(loss, lam)
        for lam in (0, 0.5, 1):
            yield {"name": "gncl", "mode": "bounded", "lambda": lam}, name, formulas.gncl_bounded(loss, lam)
        for k in (1, 2, M):
            yield {"name": "smcl", "k": k}, name, formulas.smcl(loss, k)
        if name != "nll":  # sums of probabilities are none
            yield {"name": "boosting", "shrinkage": SHRINKAGE}, name, formulas.boosting(loss, SHRINKAGE)
            stagewise = {"name": "boosting", "shrinkage": SHRINKAGE, "schedule": "stagewise"}
            yield stagewise, name, formulas.last_stage(loss, SHRINKAGE)
            yield {"name": "soft_boosting", "shrinkage": SHRINKAGE}, name, formulas.soft_boosting(loss, SHRINKAGE)
        yield {"name": "snapshot"}, name, formulas.snapshot(loss)
        yield {"name": "fast_geometric"}, name, formulas.snapshot(loss)
        yield {"name": "adaboost"}, name, formulas.independent(loss)  # of the members that are trained
        yield {"name": "swa"}, name, formulas.independent(loss)
        yield {"name": "bagging"}, name, formulas.independent(loss)
        yield {"name": "wagging"}, name, formulas.independent(loss)
        yield {"name": "stacking"}, name, formulas.independent(loss)
        yield {"name": "dropout"}, name, formulas.independent(loss)
        yield {"name": "adversarial"}, name, formulas.independent(loss)  # of each of its two passes
    for lam in (0, 0.5, 1):
        yield {"name": "ncl", "lambda": lam}, "mse", formulas.ncl(lam)
        yield {"name": "ncl", "lambda": lam}, "cross_entropy", formulas.ncl(lam)
    for name in ("cross_entropy", "mse"):
        loss = formulas.LOSSES[name]
        yield {"name": "divloss", "lambda1": 0.7, "lambda2": 0.4}, name, formulas.divloss(loss, 0.7, 0.4)
        for penalty in ("cosine", "kl", "cross_entropy"):
            table = {"name": "diversity_cooperation", "lambda": 0.6, "penalty": penalty}
            yield table, name, formulas.diversity_cooperation(loss, 0.6, penalty)


def case_id(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(str(part) for part in value.values())
    return value if isinstance(value, str) else "formula"


@pytest.mark.parametrize("members", [1, M])
@pytest.mark.parametrize(("table", "loss", "formula"), list(cases()), ids=case_id)
def test_objective_and_gradient_equal_the_formula(table, loss, formula, members):
    outputs, target = draw(loss, members)
    value = ek.objective(table, outputs, target, loss)
    expected = formula(outputs, target)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    (gradient,) = torch.autograd.grad(value, outputs)
    (expected_gradient,) = torch.autograd.grad(expected, outputs)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", plain_methods())
def test_every_installed_method_passes_gradcheck(name):
    outputs, target = draw("cross_entropy", seed=1)
    outputs, target = outputs.detach()[:3, :2].requires_grad_(), target[:2]
    if name == "boosting":  # its gradient stops at the sum of the earlier members on purpose
        outputs = outputs.detach()[:1].requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ek.objective(name, z, target), (outputs,))


def test_exact_gncl_passes_gradcheck_for_a_loss_without_closed_form():
    outputs, target = draw("exponential")
    method = {"name": "gncl", "mode": "exact", "lambda": 0.8}
    assert torch.autograd.gradcheck(lambda z: ek.objective(method, z, target, "exponential"), (outputs,))


def test_weights_multiply_the_members_losses_of_their_sample():
    outputs, target = draw("cross_entropy")
    weights = torch.rand(B, M, dtype=torch.float64)
    expected = formulas.independent(formulas.cross_entropy, weights)(outputs, target)
    for method in ("independent", "bagging", "wagging"):
        torch.testing.assert_close(ek.objective(method, outputs, target, sample_weights=weights), expected)


@pytest.mark.parametrize("name", ["boosting", "soft_boosting"])
def test_boosting_predicts_what_it_trains(name):
    from ensemblekit.core.objective import Objective

    outputs, _ = draw("cross_entropy")
    boosting = ek.methods()[name].load()(shrinkage=SHRINKAGE)
    combined = Objective([boosting], ek.MSE()).combine(outputs)
    torch.testing.assert_close(combined, SHRINKAGE * (outputs[0] + outputs[1] + outputs[2] + outputs[3]))


def test_soft_boosting_with_cross_entropy_fits_what_is_missing_to_the_right_probabilities():
    outputs, target = draw("cross_entropy")
    value = ek.objective({"name": "soft_boosting", "shrinkage": SHRINKAGE}, outputs, target)
    right = torch.nn.functional.one_hot(target, C)
    missing = [right - (SHRINKAGE * outputs[:member].sum(dim=0)).softmax(dim=-1) for member in range(M)]
    fit = sum((output - wanted).square().sum() for output, wanted in zip(outputs, missing, strict=True))
    torch.testing.assert_close(value, fit / 2 / B)
    (gradient,) = torch.autograd.grad(value, outputs)
    (expected,) = torch.autograd.grad(fit / 2 / B, outputs)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("combine", "expected"), [("mean", lambda h: sum(h) / M), ("max", lambda h: h.max(dim=0).values)]
)
def test_smcl_combines_as_told(combine, expected):
    from ensemblekit.core.objective import Objective

    outputs, _ = draw("cross_entropy")
    smcl = ek.methods()["smcl"].load()(combine=combine)
    torch.testing.assert_close(Objective([smcl], ek.MSE()).combine(outputs), expected(outputs))


def test_pairwise_terms_of_very_sure_members_stay_finite():
    outputs = torch.tensor([[[80.0, -80.0, 0.0]], [[90.0, 0.0, -90.0]]], dtype=torch.float64, requires_grad=True)
    for penalty in ("cosine", "kl", "cross_entropy"):
        method = {"name": "diversity_cooperation", "penalty": penalty}
        value = ek.objective(method, outputs, torch.tensor([0]))
        (gradient,) = torch.autograd.grad(value, outputs)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["divloss", "diversity_cooperation"])
def test_pairwise_terms_make_no_tensor_of_all_pairs(name):
    """With M = 64, any (M, M, …) intermediate would be 64 times larger than what is allowed here."""
    from torch.utils._python_dispatch import TorchDispatchMode

    members, batch, classes = 64, 2, 3
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    outputs = torch.randn(members, batch, classes)
    with Watch():
        ek.objective(name, outputs, torch.tensor([0, 1]))
    assert largest <= members * batch * classes
