"""Members are built one by one from their own seeds, and checked."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

import pytest
import torch
from ensemblekit_models.mlp import MLP
from ensemblekit_models.resnet import ResNet
from torch import nn

import ensemblekit as ek
from ensemblekit.core.errors import PluginError
from ensemblekit.core.registry import class_info
from ensemblekit.members.build import build_member, build_members

WITHOUT_REQUIRED_PARAMETERS = [
    name
    for name, info in ek.models().items()
    if not any(field.is_required() for field in info.load().model_fields.values())
]


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(
        name == other_name and torch.equal(value, other_value) for (name, value), (other_name, other_value) in pairs
    )


class Stub(ek.Model):
    """Builds whatever it is told to."""

    network: str = "right"

    def unsupported(self):
        return {"meta": "it reads its inputs"} if self.network == "reads" else {}

    def build(self, input_shape, num_outputs):
        if self.network == "equal":
            torch.manual_seed(0)
        networks = {
            "equal": lambda: nn.Linear(*input_shape, num_outputs),
            "wrong size": lambda: nn.Linear(*input_shape, num_outputs + 1),
            "fails": lambda: nn.Linear(17, num_outputs),
            "tuple": lambda: Pair(*input_shape, num_outputs),
            "no module": lambda: "network",
            "reads": lambda: nn.Sequential(Reads(), nn.BatchNorm1d(*input_shape), nn.Linear(*input_shape, num_outputs)),
        }
        return networks[self.network]()


class Pair(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs), 0


class Reads(nn.Module):
    def forward(self, inputs):
        return inputs * float(inputs.sum() + 1)


def test_a_member_is_the_same_whatever_the_size_of_the_ensemble():
    few = build_members([MLP()] * 2, (4,), 3, seed=5)
    many = build_members([MLP()] * 6, (4,), 3, seed=5)
    assert all(same(one, other) for one, other in zip(few, many, strict=False))
    assert same(many[4], build_member(MLP(), (4,), 3, seed=5, member=4))


def test_members_of_one_seed_differ_and_so_do_seeds():
    first, second = build_members([ResNet(width=2, blocks=1)] * 2, (1, 4, 4), 3, seed=0)
    assert not same(first, second)
    assert not same(first, build_member(ResNet(width=2, blocks=1), (1, 4, 4), 3, seed=1, member=0))


def test_mixed_architectures_are_a_list_of_models_and_do_not_disturb_each_other():
    mixed = build_members([MLP(), ResNet(width=2, blocks=1), MLP(hidden=(3,))], (1, 4, 4), 3, seed=0)
    assert same(mixed[0], build_member(MLP(), (1, 4, 4), 3, seed=0, member=0))
    assert same(mixed[2], build_member(MLP(hidden=(3,)), (1, 4, 4), 3, seed=0, member=2))


def test_members_that_start_equal_are_refused():
    with pytest.raises(PluginError, match=r'members 0 and 1 of model "stub" start with equal weights'):
        build_members([Stub(network="equal")] * 2, (4,), 3, seed=0)


@pytest.mark.parametrize(
    ("network", "got"),
    [
        ("wrong size", r"output is \(2, 4\)"),
        ("fails", "a network that fails with RuntimeError"),
        ("tuple", "output is a tuple"),
    ],
)
def test_a_network_with_the_wrong_output_is_blamed_on_its_model(network, got):
    with pytest.raises(PluginError, match=rf'(?s)model "stub" .*{got}.*expected \(2, 3\)'):
        build_member(Stub(network=network), (4,), 3, seed=0, member=0)


class Uneven(ek.Model):
    """Builds a wider network in each call."""

    calls: ClassVar = count()

    def build(self, input_shape, num_outputs):
        return nn.Linear(*input_shape, num_outputs + next(self.calls))


class ByMember(ek.Model):
    """Builds networks of the same weights that cut their outputs by the index of the member."""

    def build(self, input_shape, num_outputs, member):
        return Cut(nn.Linear(*input_shape, num_outputs), num_outputs - member)


class Cut(nn.Module):
    def __init__(self, layer, columns):
        super().__init__()
        self.layer, self.columns = layer, columns

    def forward(self, inputs):
        return self.layer(inputs)[:, : self.columns]


@pytest.mark.parametrize(("model", "got"), [(Uneven(), 4), (ByMember(), 2)], ids=["shapes", "index"])
def test_a_later_member_with_the_wrong_output_is_found_too(model, got):
    with pytest.raises(PluginError, match=rf"output is \(2, {got}\)"):
        build_members([model, model], (4,), 3, seed=0)


def test_networks_that_are_built_alike_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(Reads, "forward", lambda self, inputs: tried.append(1) or inputs)
    build_members([Stub(network="reads")] * 3, (4,), 3, seed=0)
    assert len(tried) == 1


def test_something_else_than_a_network_is_blamed_on_its_model():
    with pytest.raises(PluginError, match=r'(?s)model "stub" built a str.*expected a torch\.nn\.Module'):
        build_member(Stub(network="no module"), (4,), 3, seed=0, member=0)


def test_a_network_that_cannot_run_on_meta_is_tried_out_and_left_as_it_was():
    network = build_member(Stub(network="reads"), (4,), 3, seed=0, member=0)
    assert network.training
    assert network[1].running_mean.tolist() == [0] * 4
    assert int(network[1].num_batches_tracked) == 0


@pytest.mark.parametrize("name", WITHOUT_REQUIRED_PARAMETERS)
def test_building_leaves_the_global_random_numbers_and_the_statistics_alone(name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    network = ek.build_model(name, (3, 32, 32), 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(float(buffer.sum()) == 0 for key, buffer in network.named_buffers() if key.endswith("running_mean"))


@pytest.mark.parametrize("name", WITHOUT_REQUIRED_PARAMETERS)
def test_one_seed_gives_one_network_whatever_the_global_state(name):
    torch.manual_seed(1)
    first = ek.build_model(name, (3, 32, 32), 4, seed=7)
    torch.manual_seed(2)
    assert same(first, ek.build_model(name, (3, 32, 32), 4, seed=7))


def test_a_model_is_given_as_a_table_a_name_or_an_instance():
    networks = [ek.build_model(model, [4], 3) for model in ("mlp", {"name": "mlp"}, MLP())]
    assert same(networks[0], networks[1])
    assert same(networks[0], networks[2])
    assert same(networks[0], build_member(MLP(), (4,), 3, seed=0, member=0))


def test_a_member_is_built_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        network = ek.build_model("mlp", (4,), 3)
    assert same(network, ek.build_model("mlp", (4,), 3))


def test_a_misspelt_model_is_answered_with_the_nearest_name():
    with pytest.raises(ek.EnsemblekitError, match='did you mean "resnet"'):
        ek.build_model("resnt", (3, 32, 32), 4)


@pytest.mark.parametrize(("input_shape", "num_outputs"), [((), 3), ((0, 4), 3), ((4,), 0)])
def test_sizes_that_no_network_has_are_refused(input_shape, num_outputs):
    with pytest.raises(ek.UsageError, match="positive sizes"):
        ek.build_model("mlp", input_shape, num_outputs)


class Numbered(ek.Model):
    """Builds a network that depends on the member's index."""

    def build(self, input_shape, num_outputs, member):
        return nn.Sequential(nn.Linear(input_shape[0], member + 1), nn.Linear(member + 1, num_outputs))


def test_a_model_may_build_each_member_by_its_index():
    sizes = [build_member(Numbered(), (4,), 3, seed=0, member=member)[0].out_features for member in (0, 2)]
    assert sizes == [1, 3]
    assert class_info(Numbered, "numbered", "plugins=[Numbered]").name == "numbered"
