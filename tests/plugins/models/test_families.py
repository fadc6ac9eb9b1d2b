"""A family computes what its members compute one by one: outputs, gradients and numbers of parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from ensemblekit_models.batch_ensemble_resnet import BatchEnsembleResNet
from ensemblekit_models.mlp import MLP
from ensemblekit_models.packed_resnet import PackedResNet
from ensemblekit_models.resnet import ResNet
from ensemblekit_models.tabm import TabM
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import ensemblekit as ek
from ensemblekit.members.stochastic import make_reproducible, stochastic_pass

IMAGES = (2, 9, 12)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def built(model: ek.Family, shape: tuple[int, ...], outputs: int, members: int) -> nn.Module:
    """A family in float64 whose parameters have moved away from their initial values."""
    torch.manual_seed(0)
    network = model.build_family(shape, outputs, members).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def assert_equal_to_members(family: nn.Module, member: nn.Module, weights, num_members: int, inputs: Tensor) -> None:
    """Compare outputs, and gradients of a loss that weighs members and outputs differently.

    Args:
        family: The network (B, …) → (K, B, C).
        member: The ordinary network of one member.
        weights: A function of a member's index, and of a name and value in that network's state, that computes the
            member's value from the parameters of the family; gradients flow back through it.
        num_members: K.
        inputs: (B, …), float64.
    """
    outputs = family(inputs)
    separate = []
    for k in range(num_members):
        state = {name: weights(k, name, value) for name, value in member.state_dict().items()}
        separate.append(functional_call(member, state, (inputs,)))
    expected = torch.stack(separate)
    torch.testing.assert_close(outputs, expected)
    assert not torch.equal(outputs[0], outputs[1])
    factors = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names, parameters = zip(*family.named_parameters(), strict=True)
    actual, wanted = (torch.autograd.grad((factors * x.square()).sum(), parameters) for x in (outputs, expected))
    for name, left, right in zip(names, actual, wanted, strict=True):
        torch.testing.assert_close(left, right, msg=lambda text, name=name: f"{name}: {text}")
        assert left.any(), name


def rank_one(layer: nn.Module, k: int) -> Tensor:
    """Weights W * (s_k r_k^T) of one member."""
    factors = torch.outer(layer.s[k], layer.r[k])
    return layer.weight * factors.view(*factors.shape, *[1] * (layer.weight.ndim - 2))


class TestTabM:
    @pytest.mark.parametrize("shape", [(7,), (1, 2, 3)])
    def test_outputs_and_gradients_are_those_of_separate_perceptrons_with_rank_one_weights(self, shape):
        family = built(TabM(hidden=(6, 5), dropout=0), shape, 3, members=4)
        member = MLP(hidden=(6, 5), batch_norm=False).build(shape, 3).double()

        def weights(k: int, name: str, value: Tensor) -> Tensor:
            layer, kind = family.get_submodule(name.partition(".")[0]), name.partition(".")[2]
            if hasattr(layer, "r") and kind == "weight":
                return rank_one(layer, k)
            return getattr(layer, kind)[k]

        assert_equal_to_members(family, member, weights, 4, torch.randn(5, *shape, dtype=torch.float64))

    def test_the_mini_variant_is_separate_perceptrons_that_differ_in_the_first_and_last_layer(self):
        family = built(TabM(hidden=(6, 5), dropout=0, adapters="first"), (7,), 3, members=4)
        member = MLP(hidden=(6, 5), batch_norm=False).build((7,), 3).double()
        _, adapter, *layers = family

        def weights(k: int, name: str, value: Tensor) -> Tensor:
            index, kind = int(name.partition(".")[0]) - 1, name.partition(".")[2]
            shared = getattr(layers[index], kind)
            if index == len(layers) - 1:
                return shared[k]
            return shared * adapter.scale[k] if (index, kind) == (0, "weight") else shared

        assert_equal_to_members(family, member, weights, 4, torch.randn(5, 7, dtype=torch.float64))

    def test_number_of_parameters(self):
        members, inputs, outputs = 5, 8, 3
        heads = members * (6 * outputs + outputs)
        full = TabM(hidden=(7, 6)).build_family((inputs,), outputs, members)
        assert count(full) == inputs * 7 + members * (inputs + 2 * 7) + 7 * 6 + members * (7 + 2 * 6) + heads
        mini = TabM(hidden=(7, 6), adapters="first").build_family((inputs,), outputs, members)
        assert count(mini) == members * inputs + (inputs * 7 + 7) + (7 * 6 + 6) + heads

    def test_only_the_first_adapter_starts_with_random_signs_and_members_share_the_initial_biases(self):
        torch.manual_seed(0)
        first, second = (x for x in TabM(hidden=(50, 40)).build_family((30,), 2, 8) if hasattr(x, "r"))
        assert set(first.r.flatten().tolist()) == {-1.0, 1.0}
        assert abs(float(first.r.detach().mean())) < 0.3
        for ones in (first.s, second.r, second.s):
            assert torch.equal(ones, torch.ones_like(ones))
        for layer in (first, second):
            assert torch.equal(layer.bias, layer.bias[:1].expand_as(layer.bias))
            assert layer.bias[0].unique().numel() > 1

    def test_members_have_their_own_dropout_masks_which_samples_share_in_a_stochastic_pass(self):
        network = make_reproducible(TabM(hidden=(40,), dropout=0.5).build_family((3,), 2, 2), seed=0, member=0)
        features = network[:4](torch.ones(5, 3))  # in training mode
        assert not torch.equal(features[:, 0] == 0, features[:, 1] == 0)
        assert not torch.equal(features[0] == 0, features[1] == 0)
        network.eval()
        with stochastic_pass(network, 0):
            outputs = network(torch.ones(5, 3))
        torch.testing.assert_close(outputs, outputs[:, :1].expand(-1, 5, -1))
        assert not torch.allclose(outputs, network(torch.ones(5, 3)))

    def test_a_perceptron_without_hidden_layers_is_refused(self):
        with pytest.raises(ek.EnsemblekitError, match="hidden"):
            ek.build_model({"name": "tabm", "hidden": []}, (3,), 2)


def part(value: Tensor, k: int, num_members: int) -> Tensor:
    """Slice the channels of one member from a parameter or buffer of a family."""
    return value.unflatten(0, (num_members, -1))[k] if value.ndim else value.clone()


def in_family(name: str) -> str:
    """The name of a layer of `resnet` in a family, which has one more layer in front of the last."""
    return f"7{name[1:]}" if name.startswith("6") else name


class TestBatchEnsembleResNet:
    members, outputs = 3, 4

    @pytest.mark.parametrize("training", [True, False])
    def test_outputs_and_gradients_are_those_of_separate_resnets_with_rank_one_weights(self, training):
        family = built(BatchEnsembleResNet(width=5, blocks=2), IMAGES, self.outputs, self.members).train(training)
        member = ResNet(width=5, blocks=2).build(IMAGES, self.outputs).double().train(training)

        def weights(k: int, name: str, value: Tensor) -> Tensor:
            path, _, kind = in_family(name).rpartition(".")
            layer = family.get_submodule(path)
            if hasattr(layer, "r"):
                return rank_one(layer, k) if kind == "weight" else layer.bias[k]
            return part(getattr(layer, kind), k, self.members)

        assert_equal_to_members(family, member, weights, self.members, torch.randn(6, *IMAGES, dtype=torch.float64))

    def test_each_member_has_its_own_batch_norm_statistics(self):
        family = built(BatchEnsembleResNet(width=5, blocks=2), IMAGES, self.outputs, self.members).train()
        images = torch.randn(6, *IMAGES, dtype=torch.float64)
        family(images)
        for k in range(self.members):
            first = functional.conv2d(images, rank_one(family[0], k), family[0].bias[k], padding=1)
            torch.testing.assert_close(
                part(family[1].running_mean, k, self.members), 0.1 * first.mean(dim=(0, 2, 3)).detach()
            )

    def test_number_of_parameters(self):
        width, blocks, members, outputs = 5, 2, self.members, self.outputs
        family = BatchEnsembleResNet(width=width, blocks=blocks).build_family(IMAGES, outputs, members)
        channels, features = IMAGES[0], width * 2 * 3
        first = 9 * channels * width + members * (channels + 2 * width)
        convolutions = 2 * blocks * (9 * width * width + members * 2 * width)
        norms = members * 2 * width * (1 + 2 * blocks)
        last = features * outputs + members * (features + 2 * outputs)
        assert count(family) == first + convolutions + norms + last

    def test_all_factors_start_as_random_signs(self):
        family = BatchEnsembleResNet(width=16, blocks=1).build_family((3, 4, 4), 10, 4)
        factors = [value for name, value in family.named_parameters() if name.rpartition(".")[2] in "rs"]
        assert len(factors) == 2 * 4
        assert all(set(value.flatten().tolist()) == {-1.0, 1.0} for value in factors)


class TestPackedResNet:
    @pytest.mark.parametrize("training", [True, False])
    def test_with_alpha_the_number_of_members_it_is_that_many_resnets(self, training):
        members, outputs = 3, 4
        family = built(PackedResNet(width=5, blocks=2, alpha=members), IMAGES, outputs, members).train(training)
        member = ResNet(width=5, blocks=2).build(IMAGES, outputs).double().train(training)
        assert count(family) == members * count(member)

        def weights(k: int, name: str, value: Tensor) -> Tensor:
            path, _, kind = in_family(name).rpartition(".")
            grouped = getattr(family.get_submodule(path), kind)
            return grouped[k] if name.startswith("6") else part(grouped, k, members)

        assert_equal_to_members(family, member, weights, members, torch.randn(6, *IMAGES, dtype=torch.float64))

    @pytest.mark.parametrize(
        ("alpha", "members", "gamma", "own"),
        [(2, 4, 1, 16), (1, 4, 1, 8), (4, 4, 2, 32), (1, 3, 1, 11), (1, 3, 2, 12), (1.1, 1, 1, 36), (0.01, 8, 1, 1)],
    )
    def test_a_members_width_is_rounded_up_to_a_multiple_of_gamma(self, alpha, members, gamma, own):
        model = PackedResNet(width=32, blocks=2, alpha=alpha, gamma=gamma)
        assert model.member_width(members) == own
        family = model.build_family((3, 8, 8), 7, members)
        first = members * (own * 3 * 9 + own)
        convolutions = 2 * members * (own * own * 9 + own * own // gamma * 9)
        norms = 5 * 2 * members * own
        last = members * (own * 4 + 1) * 7
        assert count(family) == first + convolutions + norms + last

    def test_members_share_nothing(self):
        family = PackedResNet(width=4, blocks=1, gamma=2).build_family((3, 4, 4), 2, 3).double().eval()
        family(torch.rand(2, 3, 4, 4, dtype=torch.float64))[1].sum().backward()
        own = family[3].residual[0].weight.shape[0] // 3
        for layer in (family[0], family[3].residual[0], family[3].residual[3]):
            used = layer.weight.grad.flatten(1).abs().sum(dim=1) > 0
            assert not used[:own].any()
            assert not used[2 * own :].any()
            assert used[own : 2 * own].any()


FAMILIES = [
    TabM(hidden=(8,), dropout=0),
    TabM(hidden=(8,), adapters="first", dropout=0),
    BatchEnsembleResNet(width=4, blocks=2),
    PackedResNet(width=8, blocks=2, gamma=2),
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=["tabm", "tabm-mini", "batch-ensemble", "packed"])


@every_family
def test_a_family_with_softmax_gives_probabilities_of_each_member(family):
    model = family.model_copy(update={"softmax": True})
    assert model.gives_probabilities()
    outputs = model.build_family((1, 8, 8), 5, 3)(torch.rand(4, 1, 8, 8))
    assert outputs.shape == (3, 4, 5)
    torch.testing.assert_close(outputs.sum(dim=-1), torch.ones(3, 4))


@every_family
def test_bfloat16_autocast_works_in_evaluation_and_is_close(family):
    torch.manual_seed(0)
    network = family.build_family((1, 8, 8), 5, 3).eval()
    images = torch.rand(4, 1, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rough = network(images)
    torch.testing.assert_close(rough.float(), network(images), atol=0.05, rtol=0.05)


@every_family
def test_a_copy_is_independent(family):
    network = family.build_family((1, 8, 8), 5, 3).eval()
    images = torch.rand(4, 1, 8, 8)
    before = network(images)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(network(images), before)


@pytest.mark.parametrize("name", ["batch_ensemble_resnet", "packed_resnet"])
def test_images_that_vanish_and_tables_are_refused(name):
    model = ek.models()[name].load()
    with pytest.raises(ek.UsageError, match=r"(?s)8×8 can be halved only 3 times.*set blocks to 3 or less"):
        model(blocks=4).build_family((1, 8, 8), 10, 2)
    with pytest.raises(ek.UsageError, match=r"needs images .* but inputs have shape \(64,\)"):
        model().build_family((64,), 10, 2)
