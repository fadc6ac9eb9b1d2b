"""A trunk with several heads is the trunk's network followed by a separate linear layer for each member."""

from __future__ import annotations

import pytest
import torch
from ensemblekit_models.mlp import MLP
from ensemblekit_models.multi_head import MultiHead
from ensemblekit_models.resnet import ResNet
from ensemblekit_models.tabm import TabM
from helpers.broken_models import TRAINS
from torch import nn

import ensemblekit as ek
from ensemblekit.testing import contract

MEMBERS, FEATURES, OUTPUTS = 3, 7, 4
TRUNKS = [(MLP(hidden=(6,)), (5,)), (ResNet(width=4, blocks=2), (2, 9, 12))]
each_trunk = pytest.mark.parametrize(("model", "shape"), TRUNKS, ids=["mlp", "resnet"])


def family(model: ek.Model, shape: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return MultiHead(model=model, features=FEATURES).build_family(shape, OUTPUTS, MEMBERS).double()


@each_trunk
def test_outputs_and_gradients_are_those_of_the_trunk_and_separate_heads(model, shape):
    network = family(model, shape)
    trunk = model.build(shape, FEATURES).double()
    trunk.load_state_dict(network[0].state_dict())
    heads = [nn.Linear(FEATURES, OUTPUTS).double() for _ in range(MEMBERS)]
    for k, head in enumerate(heads):
        head.load_state_dict({"weight": network[2].weight[k], "bias": network[2].bias[k]})
    inputs = torch.randn(6, *shape, dtype=torch.float64)
    outputs, features = network(inputs), trunk(inputs).relu()
    expected = torch.stack([head(features) for head in heads])
    torch.testing.assert_close(outputs, expected)
    factors = torch.randn(MEMBERS, 6, OUTPUTS, dtype=torch.float64)
    for value in (outputs, expected):
        (factors * value.square()).sum().backward()
    for left, right in zip(network[0].parameters(), trunk.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    torch.testing.assert_close(network[2].weight.grad, torch.stack([head.weight.grad for head in heads]))
    torch.testing.assert_close(network[2].bias.grad, torch.stack([head.bias.grad for head in heads]))


@each_trunk
def test_number_of_parameters(model, shape):
    own, trunk = (sum(p.numel() for p in x.parameters()) for x in (family(model, shape), model.build(shape, FEATURES)))
    assert own == trunk + MEMBERS * (FEATURES * OUTPUTS + OUTPUTS)


def test_softmax_gives_probabilities_of_each_member():
    model = MultiHead(model=MLP(hidden=(6,)), softmax=True)
    assert model.gives_probabilities()
    outputs = model.build_family((5,), OUTPUTS, MEMBERS)(torch.rand(6, 5))
    torch.testing.assert_close(outputs.sum(dim=-1), torch.ones(MEMBERS, 6))


class Fitted(MLP):
    fitted = True


class ForOneMember(MLP):
    def build(self, input_shape, num_outputs, member):
        return super().build(input_shape, num_outputs)


@pytest.mark.parametrize(
    ("trunk", "reason"),
    [
        (TabM(hidden=(4,)), '"tab_m" is a family'),
        (MLP(softmax=True), "ends with a softmax"),
        (Fitted(), "is fitted to the data"),
        (ForOneMember(), "another network for each member"),
    ],
)
def test_a_model_that_is_no_trunk_is_refused_with_the_reason(trunk, reason):
    spec = ek.load_spec({"data": {"name": "digits"}, "model": {"name": "mlp"}})
    assert list(MultiHead(model=MLP()).check_spec(spec)) == []
    (problem,) = MultiHead(model=trunk).check_spec(spec)
    assert (problem.path, reason in problem.what, bool(problem.fix)) == ("model", True, True)


@pytest.mark.contract
@each_trunk
def test_it_passes_the_contract_of_families(model, shape):
    results = [check.result() for check in contract(MultiHead(model=model)) if check.name != TRAINS]
    assert [f"{result.name}: {result.message}" for result in results if not result.passed] == []
