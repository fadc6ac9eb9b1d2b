"""The extension points of a step against the same step written in plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.extending_plugins import PLUGINS
from torch import nn
from torch.nn.functional import cross_entropy

import ensemblekit as ek
from ensemblekit import Method, hookimpl
from ensemblekit.core.errors import PluginError, UsageError
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Mix, Objective
from ensemblekit.members.stochastic import MemberUniform

ENGINES = ("sequential", "threaded", "stacked")
RATE, SAMPLES = 0.1, 60
GENERATOR = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(SAMPLES, 5, generator=GENERATOR), torch.randint(3, (SAMPLES,), generator=GENERATOR)


class Linear(ek.Model):
    """One linear layer."""

    def build(self, input_shape, num_outputs):
        return nn.Linear(input_shape[0], num_outputs)


def train(path, engine="sequential", epochs=3, method=(), **changes):
    """Full-batch gradient descent on three linear members."""
    spec = {
        "data": {"name": "given", "validation_fraction": 0},
        "model": {"name": "linear"},
        "ensemble": {"members": 3},
        "method": list(method),
        "training": {"epochs": epochs, "batch_size": SAMPLES, "optimizer": {"name": "sgd", "lr": RATE}},
        "engine": {"name": engine, "device": "cpu"},
    }
    data = ((INPUTS, TARGETS), (INPUTS, TARGETS))
    return ek.train(spec | changes, path, progress=False, data=data, plugins=[Linear, *PLUGINS])


def start(member: int) -> nn.Linear:
    from ensemblekit.members.build import build_member

    return build_member(Linear(), (5,), 3, 0, member)


def weights_of(run) -> list[torch.Tensor]:
    return [torch.cat([value.flatten() for value in member.parameters()]) for member in run.ensemble.members]


def order(epoch: int) -> torch.Tensor:
    from ensemblekit.core.seeds import generator

    return torch.randperm(SAMPLES, generator=generator(0, "order", epoch))


def descend(member: nn.Linear, gradient_of, epochs: int = 3) -> torch.Tensor:
    for _ in range(epochs):
        gradients = gradient_of(member)
        with torch.no_grad():
            for value, gradient in zip(member.parameters(), gradients, strict=True):
                value -= RATE * gradient
    return torch.cat([value.detach().flatten() for value in member.parameters()])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_penalty_of_the_weights_adds_its_gradient(engine, tmp_path):
    run = train(tmp_path / "run", engine, method=[{"name": "anchored", "strength": 0.3}])
    for index, found in enumerate(weights_of(run)):
        anchor = [value.detach().clone() for value in start(index).parameters()]

        def gradient(member, anchor=anchor):
            pulled = sum((v - a).square().sum() for v, a in zip(member.parameters(), anchor, strict=True))
            value = cross_entropy(member(INPUTS), TARGETS) / 3 + 0.3 * pulled
            return torch.autograd.grad(value, list(member.parameters()))

        torch.testing.assert_close(found, descend(start(index), gradient), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradient_at_second_weights_updates_the_first(engine, tmp_path):
    run = train(tmp_path / "run", engine, method=[{"name": "sharp", "radius": 0.2}])

    def gradient(member):
        def at(parameters):
            outputs = INPUTS @ parameters[0].T + parameters[1]
            return torch.autograd.grad(cross_entropy(outputs, TARGETS) / 3, parameters)

        first = [value.detach().clone().requires_grad_() for value in member.parameters()]
        slope = at(first)
        norm = torch.cat([part.flatten() for part in slope]).norm()
        return at([(v + 0.2 * g / norm).detach().requires_grad_() for v, g in zip(first, slope, strict=True)])

    for index, found in enumerate(weights_of(run)):
        torch.testing.assert_close(found, descend(start(index), gradient), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gate_gets_the_gradient_of_the_whole_formula(engine, tmp_path):
    groups = [{"role": "auxiliary", "name": "gate", "model": {"name": "linear"}}]
    run = train(tmp_path / "run", engine, 1, [{"name": "gate"}], ensemble={"members": 3, "groups": groups})
    members, gate = [start(index) for index in range(3)], start(3)
    outputs = torch.stack([member(INPUTS) for member in members])
    shares = gate(INPUTS).softmax(dim=-1)
    value = cross_entropy(torch.einsum("bm,mbc->bc", shares, outputs), TARGETS)
    value = value + sum(cross_entropy(one, TARGETS) for one in outputs) / 3
    networks = nn.ModuleList([*members, gate])
    gradients = torch.autograd.grad(value, list(networks.parameters()))
    for found, before, gradient in zip(
        run.ensemble.members.parameters(), networks.parameters(), gradients, strict=True
    ):
        torch.testing.assert_close(found.detach(), before.detach() - RATE * gradient, rtol=1e-4, atol=1e-6)
    assert len(run.members) == 3  # the gate is not one of them


@pytest.mark.parametrize("engine", ENGINES)
def test_members_of_a_group_have_a_learning_rate_and_a_loss_of_their_own(engine, tmp_path):
    groups = [
        {"members": 2, "optimizer": {"lr": 0.5}, "loss": {"label_smoothing": 0.2}},
        {"members": 1},
    ]
    run = train(tmp_path / "run", engine, ensemble={"groups": groups})
    for index, found in enumerate(weights_of(run)):
        smoothing, factor = (0.2, 5) if index < 2 else (0.0, 1)

        def gradient(member, smoothing=smoothing, factor=factor):
            value = cross_entropy(member(INPUTS), TARGETS, label_smoothing=smoothing)
            return torch.autograd.grad(factor * value / 3, list(member.parameters()))

        torch.testing.assert_close(found, descend(start(index), gradient), rtol=1e-4, atol=1e-6)


def test_label_smoothing_is_that_of_torch():
    outputs = torch.randn(4, 7, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(5, (7,))
    found = CrossEntropy(label_smoothing=0.3)(outputs, target)
    expected = cross_entropy(outputs.flatten(0, 1), target.repeat(4), label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(found.flatten(), expected)
    at, direction = outputs.detach()[0, :1], outputs.detach()[1, :1]
    hessian = torch.autograd.functional.hessian(lambda z: cross_entropy(z, target[:1], label_smoothing=0.3), at)
    form = CrossEntropy(label_smoothing=0.3).quadratic_form(at, target[:1], direction)
    torch.testing.assert_close(form[0], direction[0] @ hessian[0, :, 0] @ direction[0])


def test_mixed_samples_have_the_objective_of_both_targets():
    outputs = torch.randn(3, 6, 4, dtype=torch.float64)
    target, partner = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([3, 4, 5, 0, 1, 2])
    share = torch.rand(6, dtype=torch.float64)
    mixed = share.unsqueeze(1) * nn.functional.one_hot(target, 4)
    mixed = mixed + (1 - share).unsqueeze(1) * nn.functional.one_hot(target[partner], 4)
    found = Objective([], CrossEntropy())(outputs, target, mix=Mix(partner, share))
    torch.testing.assert_close(found, cross_entropy(outputs.flatten(0, 1), mixed.repeat(3, 1)))


def test_random_numbers_of_several_members_are_those_of_each_by_itself():
    device = torch.device("cpu")
    together = MemberUniform(MemberUniform.keys_of(7, [2, 5], device), 3)
    alone = [MemberUniform(MemberUniform.keys_of(7, [index], device), 3) for index in (2, 5)]
    for fixed in (True, False):
        numbers = together(4, 3, fixed=fixed)
        assert torch.equal(numbers, torch.cat([one(4, 3, fixed=fixed) for one in alone]))
    later = MemberUniform(MemberUniform.keys_of(7, [2], device), 4)
    first = MemberUniform(MemberUniform.keys_of(7, [2], device), 3)
    assert torch.equal(later(50, fixed=True), first(50, fixed=True))
    assert not torch.equal(later(50), first(50))


def test_each_member_keeps_its_view_from_training_to_prediction(tmp_path):
    run = train(tmp_path / "run", method=[{"name": "own_columns"}])
    unseen = [
        member.weight.detach() - start(index).weight.detach() for index, member in enumerate(run.ensemble.members)
    ]
    kept = [(change != 0).any(dim=0) for change in unseen]  # columns that a member does not see get no gradient
    assert len({tuple(columns.tolist()) for columns in kept}) > 1
    for index, columns in enumerate(kept):
        changed = INPUTS.clone()
        changed[:, ~columns] += 100
        assert torch.equal(run.ensemble.member_outputs(changed)[index], run.ensemble.member_outputs(INPUTS)[index])


def test_one_spec_trained_twice_shares_no_state_of_its_methods(tmp_path):
    spec = {"name": "weighted"}
    base = {"data": {"name": "digits", "limit_train": 60, "limit_test": 30}, "model": {"name": "mlp", "hidden": [4]}}
    base |= {"method": spec, "ensemble": {"members": 2}, "training": {"epochs": 2}, "engine": {"name": "sequential"}}
    from ensemblekit.members.python_specs import registry_of
    from ensemblekit.spec.reader import load_spec

    loaded = load_spec(base, None, registry_of(PLUGINS))
    runs = [ek.train(loaded, tmp_path / str(number), progress=False, plugins=PLUGINS) for number in range(2)]
    assert runs[0].metrics == runs[1].metrics
    assert loaded.methods[0].state()["rounds"] == 0


# What cannot be done is refused, and the error says why.


def life_cycle(action):
    class Acts(Method):
        """Does something to the ensemble."""

        @hookimpl
        def epoch_started(self, ensemble, epoch):
            if epoch == 1:
                action(ensemble)

    return Acts


FAMILY = {"model": {"name": "heads"}}
REFUSED = {
    "no such member": (lambda ensemble: ensemble.freeze(99), {}, PluginError, "there is no member 99 to freeze"),
    "all frozen": (lambda e: [e.freeze(i) for i in range(3)], {}, PluginError, "every member is frozen"),
    "freezing in a family": (lambda e: e.freeze(0), FAMILY, UsageError, "3 members in one network"),
    "copying in a family": (lambda e: e.keep_copy(1), FAMILY, UsageError, "3 members in one network"),
    "weights of another shape": (lambda e: e.set_sample_weights(torch.ones(3)), {}, PluginError, "sample weights"),
    "negative weights": (lambda e: e.set_sample_weights(-torch.ones(SAMPLES, 3)), {}, PluginError, "sample weights"),
    "removing the last": (lambda e: [e.drop(0) for _ in range(3)], {}, PluginError, "the last member"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_life_cycle_hook_cannot_do_is_refused(case, tmp_path):
    action, changes, error, words = REFUSED[case]
    spec = {"data": {"name": "given", "validation_fraction": 0}, "model": {"name": "linear"}, "method": "acts"}
    spec |= {"ensemble": {"members": 3}, "engine": {"name": "sequential"}, **changes}
    with pytest.raises(error, match=words):
        ek.train(
            spec,
            tmp_path / "run",
            progress=False,
            data=((INPUTS, TARGETS), (INPUTS, TARGETS)),
            plugins=[Linear, life_cycle(action), *PLUGINS],
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": ["adversarial", "sharp"]}, "both need a second pass"),
        ({"method": ["own_columns"], "model": {"name": "heads"}}, "own inputs"),
        ({"method": ["student"]}, '"student", and the spec has none'),
        ({"method": [{"name": "snapshot", "at_epochs": [2, 3]}], "model": {"name": "heads"}}, "one network"),
        (
            {"ensemble": {"groups": [{"members": 1}, {"members": 1, "model": {"name": "features"}}]}},
            "different outputs beside",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        train(tmp_path / "run", **({"method": ()} | changes))


def test_blending_averages_weights_and_statistics_are_those_of_torch(tmp_path):
    seen = {}

    def look(ensemble):
        networks = [state.network for state in ensemble.members.states]
        before = [{name: value.clone() for name, value in network.state_dict().items()} for network in networks]
        ensemble.blend(0, 1, 0.25)
        for name, value in networks[0].state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, 0.75 * before[0][name] + 0.25 * before[1][name])
        expected = torch.nn.Sequential(*networks[0])
        batches = [batch.inputs for batch in ensemble._trainer.data.train.batches(50)]
        ensemble.refresh_statistics(0)
        found = {name: value.clone() for name, value in networks[0].state_dict().items()}
        torch.optim.swa_utils.update_bn(batches, expected)
        for name, value in networks[0].state_dict().items():
            torch.testing.assert_close(found[name], value)
        seen["done"] = True

    class Looks(life_cycle(look)):
        """Blends and looks."""

    spec = {"data": {"name": "digits", "limit_train": 100}, "model": {"name": "mlp", "hidden": [6]}, "method": "looks"}
    spec |= {"training": {"epochs": 1, "batch_size": 50}, "engine": {"name": "sequential"}}
    ek.train(spec, tmp_path / "run", progress=False, plugins=[Looks])
    assert seen
