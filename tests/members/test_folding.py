"""Networks made ready to predict give the outputs of the networks themselves, and follow their changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members import folding as inference
from ensemblekit.members.build import build_member, build_members
from ensemblekit.members.folding import FoldedMember, MaxPoolWithoutIndices, folded

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def trained(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A network in double precision whose statistics are no longer those it started with."""
    network.double().train()
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.affine:
                layer.weight.uniform_(0.5, 2)
                layer.bias.uniform_(-1, 1)
        for _ in range(3):
            network(torch.randn(8, *shape, dtype=torch.float64))
    return network.eval()


@pytest.mark.parametrize(
    ("name", "shape"), [("resnet", (3, 16, 16)), ("mlp", (1, 8, 8)), ("mobilenet_v3_tiny", (3, 32, 32))]
)
def test_a_folded_network_has_no_batch_norm_and_gives_the_same_outputs_to_twelve_digits(name, shape):
    network = trained(build_member(ek.models()[name].load()(), shape, 5, seed=0, member=0), shape)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    twin, count = folded(network)
    inputs = torch.randn(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(twin(inputs), network(inputs), rtol=1e-12, atol=1e-12)
    assert count == sum(isinstance(layer, NORMS) for layer in network.modules()) > 0
    assert not any(isinstance(layer, NORMS) for layer in twin.modules())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


class Scaled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


class Backwards(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        for layer in reversed(list(self)):
            inputs = layer(inputs)
        return inputs


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.BatchNorm1d(4), layer)


def watched() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    network[0].register_forward_hook(lambda _, __, outputs: outputs + 1)
    return network


@pytest.mark.parametrize(
    "make",
    [
        shared,
        watched,
        lambda: nn.Sequential(Scaled(4, 4), nn.BatchNorm1d(4)),
        lambda: Backwards(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
    ],
    ids=["shared", "watched", "subclass", "own order", "not adjacent", "no statistics"],
)
def test_what_is_not_sure_to_be_valid_is_not_folded(make):
    network = trained(make(), (4,))
    twin, count = folded(network)
    inputs = torch.randn(5, 4, dtype=torch.float64)
    assert count == 0
    torch.testing.assert_close(twin(inputs), network(inputs))


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (2, 3)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_pooling_that_halves_images_gives_the_same_bits(size, layout):
    pool = nn.Sequential(nn.MaxPool2d(2))
    twin, _ = folded(pool)
    assert isinstance(twin[0], MaxPoolWithoutIndices)
    images = torch.randn(5, 3, *size).to(memory_format=layout)
    images[0, 0, 0, 0] = float("nan")
    found, expected = twin(images), pool(images)
    assert found.is_contiguous(memory_format=layout)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d((2, 1)),
        nn.AvgPool2d(2),
    ],
    ids=str,
)
def test_other_poolings_stay_as_they_are(pool):
    twin, _ = folded(nn.Sequential(pool))
    images = torch.randn(2, 3, 9, 9)
    assert type(twin[0]) is type(pool)
    assert torch.equal(twin(images), pool(images))


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_large_batch_is_taken_in_pieces_that_give_the_whole(channels_last, monkeypatch):
    network = trained(build_member(ek.models()["resnet"].load()(width=4, blocks=2), (3, 8, 8), 5, 0, 0), (3, 8, 8))
    monkeypatch.setattr(inference, "CHUNK_BYTES", 10 * 3 * 8 * 8 * 8)
    sizes = []
    ready = FoldedMember(network, channels_last)
    ready.network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    inputs = torch.randn(23, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(ready(inputs)[0], network(inputs), rtol=1e-12, atol=1e-12)
    assert sizes == [10, 10, 3]


@pytest.fixture
def ensemble() -> Ensemble:
    spec = ek.load_spec({"data": "digits", "model": {"name": "mlp", "hidden": [8]}, "ensemble": {"members": 3}})
    return Ensemble(build_members(spec.member_models, (1, 8, 8), 10, 0), spec, spec.data.info).eval()


def test_an_ensemble_predicts_the_same_with_and_without_gradients(ensemble):
    inputs = torch.randn(7, 1, 8, 8)
    with torch.no_grad():
        fast = ensemble.member_outputs(inputs)
    plain = ensemble.member_outputs(inputs, enable_grad=True)
    assert plain.requires_grad
    assert not fast.requires_grad
    torch.testing.assert_close(fast, plain.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["in place", "state dict", "another tensor", "statistics"])
def test_an_ensemble_notices_that_its_members_have_changed(ensemble, change):
    inputs = torch.randn(7, 1, 8, 8)
    with torch.no_grad():
        before = ensemble(inputs)
        linear, norm = ensemble.members[1][1], ensemble.members[1][2]
        if change == "in place":
            linear.weight.mul_(2)
        elif change == "state dict":
            ensemble.load_state_dict({name: value + 1 for name, value in ensemble.state_dict().items()})
        elif change == "another tensor":
            linear.weight = nn.Parameter(torch.ones_like(linear.weight))
        else:
            norm.running_mean.add_(1)
        after = ensemble(inputs)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, ensemble(inputs).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_a_deep_copy_is_an_ensemble_of_its_own(ensemble, training):
    inputs = torch.randn(7, 1, 8, 8)
    with torch.no_grad():
        before = ensemble(inputs)  # its threads have started
        ensemble.train(training)
        twin = copy.deepcopy(ensemble)
        assert {module.training for module in twin.modules()} == {training}
        assert torch.equal(twin.eval()(inputs), before)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(inputs).any()
        assert torch.equal(ensemble.eval()(inputs), before)


def test_an_ensemble_of_tensors_without_versions_is_never_out_of_date(ensemble):
    inputs = torch.randn(7, 1, 8, 8)
    with torch.inference_mode():
        mine = copy.deepcopy(ensemble)
        before = mine(inputs)
        for parameter in mine.parameters():
            parameter.mul_(2)
        assert not torch.allclose(mine(inputs), before)


def test_copies_are_not_mistaken_for_those_of_tensors_that_had_the_same_address(ensemble):
    inputs = torch.randn(7, 1, 8, 8)
    network = ensemble.members[0]
    with torch.no_grad():
        for _ in range(50):
            ensemble(inputs)
            for change in (0, 1):  # the second time, memory of the first is free
                state = {name: value + change for name, value in network.state_dict().items()}
                network.load_state_dict(state, assign=True)
            # weights grow by 1 in each round, and rounding with them
            torch.testing.assert_close(ensemble.member_outputs(inputs)[0], network(inputs), rtol=1e-4, atol=1e-3)


def test_a_layer_in_training_and_a_hook_that_came_later_count(ensemble):
    inputs = torch.randn(7, 1, 8, 8)
    seen = []
    with torch.no_grad():
        before = ensemble(inputs)
        ensemble.members[0][1].register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(ensemble(inputs), before)
        assert seen
        ensemble.members[0][2].train()
        assert not torch.allclose(ensemble(inputs), before)


def test_an_ensemble_in_training_runs_its_members_as_they_are(ensemble):
    ensemble.train()
    inputs = torch.randn(7, 1, 8, 8)
    count = int(ensemble.members[0][2].num_batches_tracked)
    with torch.no_grad():
        ensemble(inputs)
    assert int(ensemble.members[0][2].num_batches_tracked) == count + 1
