"""The equalities between methods that must hold."""

from __future__ import annotations

import pytest
import torch
from helpers.plain_methods import plain_methods

import ensemblekit as ek

M, B, C = 5, 6, 4
GENERATOR = torch.Generator().manual_seed(3)
OUTPUTS = torch.randn(M, B, C, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(C, (B,), generator=GENERATOR)
REAL = torch.randn(B, C, generator=GENERATOR, dtype=torch.float64)


def assert_equal(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize(("lam", "other"), [(0, "independent"), (1, "end_to_end")])
def test_gncl_interpolates_between_independent_and_end_to_end(lam, other, loss):
    assert_equal(
        ek.objective({"name": "gncl", "lambda": lam}, OUTPUTS, CLASSES, loss),
        ek.objective(other, OUTPUTS, CLASSES, loss),
    )


def test_exact_gncl_without_weight_is_independent():
    exact = {"name": "gncl", "mode": "exact", "lambda": 0}
    assert_equal(ek.objective(exact, OUTPUTS, CLASSES), ek.objective("independent", OUTPUTS, CLASSES))


@pytest.mark.parametrize("target", [CLASSES, REAL], ids=["classes", "real"])
@pytest.mark.parametrize("lam", [0, 0.3, 1, 2])
def test_ncl_is_exact_gncl_with_the_squared_error(lam, target):
    exact = {"name": "gncl", "mode": "exact", "lambda": lam}
    ncl = {"name": "ncl", "lambda": lam}
    assert_equal(ek.objective(exact, OUTPUTS, target, "mse"), ek.objective(ncl, OUTPUTS, target, "mse"))


@pytest.mark.parametrize("target", [CLASSES, REAL], ids=["classes", "real"])
def test_ncl_with_full_weight_is_end_to_end(target):
    ncl = ek.objective({"name": "ncl", "lambda": 1}, OUTPUTS, target, "mse")
    assert_equal(ncl, ek.objective("end_to_end", OUTPUTS, target, "mse"))


def test_bagging_with_equal_weights_is_independent():
    weights = torch.ones(B, M, dtype=torch.float64)
    bagging = ek.objective("bagging", OUTPUTS, CLASSES, sample_weights=weights)
    assert_equal(bagging, ek.objective("independent", OUTPUTS, CLASSES))


def test_diversity_cooperation_with_cross_entropy_is_divloss_less_the_ensembles_loss():
    lam = 0.7
    cooperation = {"name": "diversity_cooperation", "penalty": "cross_entropy", "lambda": lam}
    divloss = {"name": "divloss", "lambda1": M, "lambda2": lam * M}
    ensemble_loss = ek.objective("end_to_end", OUTPUTS, CLASSES)
    assert_equal(ek.objective(cooperation, OUTPUTS, CLASSES), ek.objective(divloss, OUTPUTS, CLASSES) - ensemble_loss)


def test_smcl_that_selects_everyone_sums_all_losses():
    everyone = ek.objective({"name": "smcl", "k": M}, OUTPUTS, CLASSES)
    assert_equal(everyone, M * ek.objective("independent", OUTPUTS, CLASSES))


@pytest.mark.parametrize("target", [CLASSES, REAL], ids=["classes", "real"])
def test_soft_boosting_of_the_squared_error_is_boosting_whose_earlier_members_look_ahead(target):
    def value_and_gradient(name):
        outputs = OUTPUTS.clone().requires_grad_()
        value = ek.objective(name, outputs, target, "mse")
        return value, torch.autograd.grad(value, outputs)[0]

    (soft, soft_gradient), (hard, hard_gradient) = value_and_gradient("soft_boosting"), value_and_gradient("boosting")
    assert_equal(soft, hard)
    assert_equal(soft_gradient[-1], hard_gradient[-1])
    # the residual of a member moves against each member before it, so these carry the later members' gradients too
    assert_equal(soft_gradient, hard_gradient.flip(0).cumsum(0).flip(0))


# its first member fits the slope of the loss at zero, and it is no network's loss
@pytest.mark.parametrize("name", sorted(set(plain_methods()) - {"soft_boosting"}))
def test_a_single_member_is_a_single_network(name):
    single = OUTPUTS[:1]
    loss = "mse" if name == "ncl" else "cross_entropy"
    expected = torch.nn.functional.cross_entropy(single[0], CLASSES)
    if name == "ncl":
        expected = 0.5 * (single[0] - torch.nn.functional.one_hot(CLASSES, C)).square().sum(-1).mean()
    scale = 2 if name == "divloss" else 1  # it judges the ensemble and its only member: the same network twice
    assert_equal(ek.objective(name, single, CLASSES, loss), scale * expected)


def test_methods_compose_weights_from_one_and_losses_from_the_other():
    weights = torch.rand(B, M, dtype=torch.float64)
    together = ek.objective(["bagging", {"name": "gncl", "lambda": 0.4}], OUTPUTS, CLASSES, sample_weights=weights)
    losses = -OUTPUTS.log_softmax(-1)[:, torch.arange(B), CLASSES]
    ensemble = -OUTPUTS.mean(0).log_softmax(-1)[torch.arange(B), CLASSES]
    assert_equal(together, (0.4 * ensemble + 0.6 / M * (weights.T * losses).sum(0)).mean())


def test_the_last_listed_method_wins():
    both = ek.objective(["end_to_end", "gncl"], OUTPUTS, CLASSES)
    assert_equal(both, ek.objective("gncl", OUTPUTS, CLASSES))
    reverse = ek.objective(["gncl", "end_to_end"], OUTPUTS, CLASSES)
    assert_equal(reverse, ek.objective("end_to_end", OUTPUTS, CLASSES))


def test_independent_training_gives_each_member_the_weights_of_a_run_by_itself():
    """Bit for bit, for a number of members that is a power of two, the factor 1/M being in the learning rate."""
    size, steps = 4, 5
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(steps, B, 3, generator=generator, dtype=torch.float64)

    def build(member: int) -> torch.nn.Module:
        torch.manual_seed(member)
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, C)).double()

    def train(members: list[torch.nn.Module], rate: float) -> None:
        optimizer = torch.optim.SGD([weight for net in members for weight in net.parameters()], lr=rate)
        for batch in inputs:
            optimizer.zero_grad()
            ek.objective("independent", torch.stack([net(batch) for net in members]), CLASSES).backward()
            optimizer.step()

    together = [build(member) for member in range(size)]
    train(together, 0.1 * size)
    for member in range(size):
        alone = build(member)
        train([alone], 0.1)
        for left, right in zip(together[member].parameters(), alone.parameters(), strict=True):
            assert torch.equal(left, right)


SINGLE = [
    ({"name": "gncl", "lambda": 0.3}, "cross_entropy", 1),
    ({"name": "gncl", "mode": "exact", "lambda": 0.7}, "cross_entropy", 1),
    ({"name": "gncl", "mode": "bounded", "lambda": 1.0}, "cross_entropy", 1),
    ({"name": "end_to_end"}, "cross_entropy", 1),
    ({"name": "ncl", "lambda": 0.8}, "mse", 1),
    ({"name": "divloss", "lambda1": 0.5, "lambda2": 0.4}, "cross_entropy", 1.5),
    ({"name": "diversity_cooperation", "penalty": "cosine"}, "cross_entropy", 1),
    ({"name": "diversity_cooperation", "penalty": "kl"}, "cross_entropy", 1),
    ({"name": "diversity_cooperation", "penalty": "cross_entropy"}, "cross_entropy", 1),
    ({"name": "smcl"}, "cross_entropy", 1),
    ({"name": "boosting"}, "cross_entropy", 1),
]


@pytest.mark.parametrize(("method", "loss", "factor"), SINGLE, ids=lambda value: str(value))
def test_training_a_single_member_is_training_a_single_network(method, loss, factor, tmp_path):
    """In SGD a constant factor of the objective is one of the learning rate."""

    def train(name: str, methods: object, rate: float) -> ek.Run:
        spec = {
            "data": {"name": "digits", "limit_train": 150, "limit_test": 50},
            "model": {"name": "mlp", "hidden": [8]},
            "ensemble": {"members": 1},
            "method": methods,
            "training": {"epochs": 2, "batch_size": 30, "loss": loss, "optimizer": {"name": "sgd", "lr": rate}},
            "engine": {"name": "sequential", "device": "cpu"},
        }
        return ek.train(spec, tmp_path / name, progress=False)

    one, network = train("method", method, 0.3 / factor), train("network", [], 0.3)
    for left, right in zip(one.ensemble.parameters(), network.ensemble.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert one.metrics["test_diversity"] == pytest.approx(0, abs=1e-6)
    assert one.metrics["test_loss"] == pytest.approx(one.metrics["test_mean_member_loss"])
