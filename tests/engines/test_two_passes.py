"""Steps of two passes, the second from inputs that each member's own gradient has made of the first."""

from __future__ import annotations

import warnings
from copy import deepcopy

import pytest
import torch
from helpers.engine_training import (
    MLP,
    RESNET,
    B,
    C,
    M,
    assert_same_training,
    batches,
    member_states,
    method,
    model,
    settings,
    train,
)
from torch import Tensor, nn
from torch.nn import functional

import ensemblekit as ek
from ensemblekit import Method, hookimpl
from ensemblekit.core.errors import PluginError
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.selection import engine_class
from ensemblekit.members.state import MemberState
from ensemblekit.members.stochastic import Noise
from ensemblekit.spec.sections import ENGINES

EPSILON, RATE = 0.05, 0.01
ADVERSARIAL = {"name": "adversarial", "epsilon": EPSILON}
COMPOSED = {
    "adversarial": [ADVERSARIAL],
    "with gncl": [ADVERSARIAL, {"name": "gncl"}],
    "with bagging": [{"name": "bagging"}, ADVERSARIAL],
    "with boosting": [ADVERSARIAL, {"name": "boosting"}],
    "with smcl": [{"name": "smcl"}, ADVERSARIAL],
}
QUIET = model("mlp", hidden=(8,))


def objective(tables: list[dict]) -> Objective:
    return Objective([method(table) for table in tables], CrossEntropy())


def weights(members: int = M) -> Tensor:
    return torch.rand(B, members, generator=torch.Generator().manual_seed(1))


def algorithm_1(networks: list[nn.Module], lam: float = 0.0) -> None:
    """Lakshminarayanan et al. 2017, algorithm 1, on a few batches, by hand; lam > 0 couples members as GNCL does."""

    def minimised(outputs: list[Tensor], target: Tensor) -> Tensor:
        own = sum(functional.cross_entropy(each, target) for each in outputs) / len(outputs)
        return (1 - lam) * own + lam * functional.cross_entropy(torch.stack(outputs).mean(dim=0), target)

    optimizers = [torch.optim.SGD(network.parameters(), lr=RATE) for network in networks]
    for batch in batches(dtype=torch.float64):
        seen = [batch.inputs.clone().requires_grad_() for _ in networks]
        clean = minimised([network(own) for network, own in zip(networks, seen, strict=True)], batch.targets)
        slopes = torch.autograd.grad(clean, seen, retain_graph=True)
        moved = [batch.inputs + EPSILON * slope.sign() for slope in slopes]
        second = minimised([network(own) for network, own in zip(networks, moved, strict=True)], batch.targets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (clean + second).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_engines_train_as_algorithm_1_by_hand_to_twelve_digits(engine, members, lam):
    trained = member_states([QUIET] * members, dtype=torch.float64)
    expected = [deepcopy(slot.network) for slot in trained]
    algorithm_1(expected, lam)
    tables = [ADVERSARIAL, {"name": "gncl", "lambda": lam}] if lam else [ADVERSARIAL]
    train(engine, trained, objective(tables), settings("sgd"), dtype=torch.float64)
    for slot, network in zip(trained, expected, strict=True):
        torch.testing.assert_close(slot.network.state_dict(), network.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_one_step_of_logistic_regression_is_the_closed_form(engine):
    """With q the probability of class 1 and w the difference of the weights, d l / d x = (q - y) w."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(B, 5, generator=generator, dtype=torch.float64)
    target = torch.randint(2, (B,), generator=generator)
    network = nn.Linear(5, 2, bias=False).double()
    start = network.weight.detach().clone()

    def slope(weight: Tensor, seen: Tensor) -> Tensor:
        """(q - y) for each sample."""
        return torch.sigmoid(seen @ (weight[1] - weight[0])) - target

    direction = slope(start, inputs).unsqueeze(1) * (start[1] - start[0])
    moved = inputs + EPSILON * direction.sign()
    step = (slope(start, inputs) @ inputs + slope(start, moved) @ moved) / B
    running = engine_class(engine)([MemberState(network, QUIET, 0)], objective([ADVERSARIAL]), settings("sgd"))
    value, outputs = running.train_step(Batch(inputs, target, torch.arange(B)), None, RATE, 0)
    running.close()
    torch.testing.assert_close(network.weight[1] - start[1], -RATE * step, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(network.weight[0] - start[0], RATE * step, rtol=1e-12, atol=1e-14)
    passes = [functional.cross_entropy(seen @ start.T, target) for seen in (inputs, moved)]
    torch.testing.assert_close(value, sum(passes), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs[0], inputs @ start.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["threaded", "stacked"])
@pytest.mark.parametrize("tables", COMPOSED.values(), ids=COMPOSED)
def test_it_composes_with_other_methods_on_every_engine(engine, tables):
    found, expected = (
        train(
            name,
            member_states([MLP] * M, dtype=torch.float64),
            objective(tables),
            settings("sgd"),
            weights(),
            torch.float64,
        )
        for name in (engine, "sequential")
    )
    assert_same_training(found, expected, tolerance=1e-12)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("tables", list(COMPOSED.values())[:2], ids=list(COMPOSED)[:2])
@pytest.mark.parametrize("base", [MLP, RESNET], ids=["mlp", "resnet"])
def test_recomputing_repeats_the_random_numbers_of_both_passes(engine, tables, base):
    found, expected = (
        train(engine, member_states([base] * M), objective(tables), settings("sgd", recompute=again))
        for again in (True, False)
    )
    assert_same_training(found, expected, 1e-6)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_sum_of_both_passes_gradients_is_clipped(engine):
    limit = 0.01
    members = member_states([QUIET] * M)
    before = [[value.clone() for value in slot.network.parameters()] for slot in members]
    running = engine_class(engine)(members, objective([ADVERSARIAL]), settings("sgd", clip_norm=limit))
    running.train_step(batches(1)[0], None, 1.0, 0)
    running.close()
    for slot, start in zip(members, before, strict=True):
        moves = [(value - old).norm() for value, old in zip(slot.network.parameters(), start, strict=True)]
        assert torch.stack(moves).norm().item() == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("tables", list(COMPOSED.values())[:2], ids=list(COMPOSED)[:2])
def test_frozen_members_see_the_same_inputs_twice_and_stay_as_they_are(engine, tables):
    frozen = (0, 2)
    expected = train("sequential", member_states([MLP] * M, frozen), objective(tables), settings())
    members = member_states([MLP] * M, frozen)
    before = [deepcopy(slot.network.state_dict()) for slot in members]
    assert_same_training(train(engine, members, objective(tables), settings()), expected)
    for place in frozen:
        torch.testing.assert_close(members[place].network.state_dict(), before[place], rtol=0, atol=0)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_statistics_count_both_batches(engine):
    (slot,) = members = member_states([QUIET])
    train(engine, members, objective([ADVERSARIAL]), settings())
    assert slot.network.get_buffer("2.num_batches_tracked").item() == 2 * 3


class Drawn(Noise):
    """Adds random numbers to what it is given, and remembers them."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.drawn = [*getattr(self, "drawn", []), self.uniform(inputs.shape)]
        return inputs + self.drawn[-1]


def test_the_second_pass_draws_other_random_numbers_than_the_first_and_than_the_next_step():
    network = nn.Sequential(nn.Flatten(), Drawn(), nn.Linear(64, C))
    running = engine_class("sequential")([MemberState(network, QUIET, 0)], objective([ADVERSARIAL]), settings())
    for step, batch in enumerate(batches(2)):
        running.train_step(batch, None, 0.01, step)
    drawn = torch.stack(network[1].drawn).flatten(1)
    assert len(drawn) == 4
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.15


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_bf16_trains_close_to_float32(engine):
    exact, rough = (
        train(engine, member_states([RESNET] * M), objective([ADVERSARIAL]), settings("sgd", bf16=bf16))
        for bf16 in (False, True)
    )
    torch.testing.assert_close(rough[0], exact[0], rtol=0.05, atol=0.1)
    assert rough[1].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_compiled_networks_train_like_others(engine):
    tables = next(iter(COMPOSED.values()))
    # in float64, so that rounding turns no sign
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about itself
        found, expected = (
            train(
                engine, member_states([MLP] * 2, dtype=torch.float64), objective(tables), options, dtype=torch.float64
            )
            for options in (settings("sgd", compile=True), settings("sgd"))
        )
    assert_same_training(found, expected, 1e-9)


class Answers(Method):
    """Answers with something in place of second inputs."""

    answer: object

    @hookimpl
    def second_inputs(self, inputs: Tensor) -> object:
        return self.answer(inputs) if callable(self.answer) else self.answer


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda inputs: inputs[..., :1], r"of shape \("),
        (lambda inputs: inputs.double(), "float64"),
        (lambda inputs: inputs.to("meta"), "on meta"),
        (None, "None"),
    ],
)
def test_second_inputs_of_the_wrong_form_are_named_with_their_plugin(engine, answer, got):
    wrong = Objective([Answers(answer=answer)], CrossEntropy())
    running = engine_class(engine)(member_states([MLP] * 2), wrong, settings())
    with pytest.raises(
        PluginError, match=rf'(?s)plugin "answers": hook "second_inputs" returned .*{got}.*expected float32'
    ):
        running.train_step(batches(1)[0], None, 0.01, 0)
    running.close()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_second_inputs_equal_to_the_first_count_every_sample_twice(engine):
    class Same(Method):
        """Learns from everything twice."""

        @hookimpl
        def second_inputs(self, inputs: Tensor) -> Tensor:
            return inputs

    once = Objective([method({"name": "bagging"})], CrossEntropy())
    plain = model("mlp", hidden=(8,), batch_norm=False)
    expected = train(engine, member_states([plain] * M), once, settings("sgd"), torch.full((B, M), 2.0))
    twice = train(engine, member_states([plain] * M), Objective([Same()], CrossEntropy()), settings("sgd"))
    assert_same_training(twice, expected)


def test_methods_without_the_hook_have_one_pass():
    assert objective([ADVERSARIAL]).members.have_second_inputs
    for name in set(ek.methods()) - {"adversarial"}:
        assert not objective([{"name": name}]).members.have_second_inputs
