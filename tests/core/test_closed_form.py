"""Objectives that are linear in losses: their value and gradient without autograd, and when the hooks decide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ensemblekit as ek
from ensemblekit import hookimpl
from ensemblekit.core.losses import MSE, CrossEntropy
from ensemblekit.core.objective import Mix, Objective

M, B, C = 3, 6, 5
SOURCE = torch.Generator().manual_seed(0)
OUTPUTS = torch.randn(M, B, C, generator=SOURCE, dtype=torch.float64)
TARGET = torch.randint(C, (B,), generator=SOURCE)
WEIGHTS = torch.rand(B, M, generator=SOURCE, dtype=torch.float64)
IMPORTANCE = torch.rand(B, generator=SOURCE, dtype=torch.float64)
METHODS = {
    "gncl": {"lam": 0.3},
    "gncl without diversity": {"lam": 0.0},
    "end_to_end": {},
    "independent": {},
    "bagging": {},
}


def method(case: str) -> ek.Method:
    return ek.methods()[case.split()[0]].load()(**METHODS[case])


def by_autograd(objective: Objective, outputs: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    leaf = outputs.clone().requires_grad_()
    value = objective(leaf, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "loss", [CrossEntropy(), CrossEntropy(label_smoothing=0.2), MSE()], ids=["ce", "smooth", "mse"]
)
@pytest.mark.parametrize("case", METHODS)
def test_value_and_gradient_are_those_of_the_hooks(case, loss, weighted, monkeypatch):
    objective = Objective([method(case)], loss)
    more = {"weights": WEIGHTS, "importance": IMPORTANCE} if weighted else {}
    expected = by_autograd(objective, OUTPUTS, TARGET, **more)
    monkeypatch.setattr(Objective, "__call__", None)  # no hook is called
    torch.testing.assert_close(objective.value_and_gradient(OUTPUTS, TARGET, **more), expected, rtol=1e-12, atol=1e-14)


def test_many_classes_and_transposed_outputs_give_the_same():
    outputs = torch.randn(M, 40, B, dtype=torch.float64).transpose(1, 2)
    objective = Objective([method("gncl")], CrossEntropy())
    torch.testing.assert_close(objective.value_and_gradient(outputs, TARGET), by_autograd(objective, outputs, TARGET))


def test_members_of_a_separable_objective_by_themselves_add_up():
    objective = Objective([method("bagging")], CrossEntropy())
    whole, gradient = objective.value_and_gradient(OUTPUTS, TARGET, WEIGHTS)
    parts = [
        objective.value_and_gradient(OUTPUTS[i : i + 1], TARGET, WEIGHTS[:, i : i + 1], ensemble_size=M)
        for i in range(M)
    ]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    torch.testing.assert_close(torch.cat([slope for _, slope in parts]), gradient)


def test_mixed_samples_and_other_formulas_go_through_the_hooks():
    mix = Mix(torch.arange(B).flip(0), torch.rand(B, dtype=torch.float64))
    cases = [
        (Objective([method("gncl")], CrossEntropy()), {"mix": mix}),
        (Objective([ek.methods()["gncl"].load()(lam=0.1, mode="exact")], CrossEntropy()), {}),
        (Objective([ek.methods()["ncl"].load()()], MSE()), {}),
    ]
    for objective, more in cases:
        expected = by_autograd(objective, OUTPUTS, TARGET, **more)
        torch.testing.assert_close(objective.value_and_gradient(OUTPUTS, TARGET, **more), expected)


def test_a_subclass_that_overrides_a_hook_or_a_formula_is_asked_itself():
    gncl = ek.methods()["gncl"].load()

    class Doubled(gncl):
        @hookimpl
        def ensemble_loss(self, combined, target, loss):
            return 2 * loss(combined, target)

    class Squared(CrossEntropy):
        def per_sample(self, outputs, target):
            return super().per_sample(outputs, target).square()

    for objective in (Objective([Doubled(lam=0.5)], CrossEntropy()), Objective([gncl(lam=0.5)], Squared())):
        expected = by_autograd(objective, OUTPUTS, TARGET)
        torch.testing.assert_close(objective.value_and_gradient(OUTPUTS, TARGET), expected)
