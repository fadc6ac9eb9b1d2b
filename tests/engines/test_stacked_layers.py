"""Layers stacked by hand and by vmap: each member's outputs, gradients and statistics as it has them by itself."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from ensemblekit.engines.explicit_chain import explicit_chain
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.stochastic import make_reproducible, set_training_step, stochastic_layers

K, B = 3, 6


class Twice(nn.Module):
    """Nothing that is known here: it goes to vmap."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale * 2


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4)), (5,), []),
    "linear alone": (lambda: nn.Linear(5, 4), (5,), []),
    "no bias": (lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)), (5,), []),
    "rows of vectors": (lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2)), (3, 5), []),
    "batch norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.ReLU(True), nn.Linear(4, 2)),
        (3, 2, 2),
        [],
    ),
    "batch norm first": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)), (5,), []),
    "batch norm of plain statistics": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)),
        (5,),
        [],
    ),
    "batch norm of images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)),
        (3, 4, 4),
        ["Conv2d"],
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Linear(8, 2)), (5,), []),
    "dropout first": (lambda: nn.Sequential(nn.Dropout(0.4), nn.Linear(5, 2)), (5,), []),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.SiLU()), nn.Sequential(nn.Linear(4, 2))),
        (5,),
        [],
    ),
    "unknown layers": (
        lambda: nn.Sequential(nn.Linear(5, 4), Twice(4), nn.Softplus(), nn.Linear(4, 2)),
        (5,),
        ["Twice", "Softplus"],
    ),
    "unknown without parameters first": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 2)),
        (3, 2, 2),
        ["MaxPool2d"],
    ),
    "all of it unknown": (lambda: Twice(5), (5,), ["Twice"]),
    "statistics without momentum": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
        (5,),
        ["BatchNorm1d"],
    ),
}  # fmt: skip


def members(make: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make_reproducible(make().double(), seed=0, member=member) for member in range(K)]


def stacked(networks: list[nn.Module]) -> dict[str, Tensor]:
    names = [name for name, _ in [*networks[0].named_parameters(), *networks[0].named_buffers()]]
    states = [dict([*network.named_parameters(), *network.named_buffers()]) for network in networks]
    return {name: torch.stack([state[name].detach() for state in states]) for name in names}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", NETWORKS)
def test_outputs_gradients_and_statistics_are_each_members_own(case, training):
    make, shape, by_vmap = NETWORKS[case]
    networks = members(make)
    inputs = torch.randn(B, *shape, dtype=torch.float64)
    given = inputs.clone()
    skeleton = deepcopy(networks[0]).train(training)
    call = StackedNetwork(skeleton)
    assert call.vmapped_layers() == by_vmap
    tensors = stacked(networks)
    names = [name for name, _ in networks[0].named_parameters()]
    for name in names:
        tensors[name].requires_grad_()
    outputs = call(tensors, inputs)
    gradients = torch.autograd.grad(outputs.square().sum(), [tensors[name] for name in names])
    assert torch.equal(inputs, given)
    for place, network in enumerate(networks):
        network.train(training)
        set_training_step(stochastic_layers(network), 0)
        expected = network(inputs.clone())
        torch.testing.assert_close(outputs[place], expected, rtol=1e-12, atol=1e-12)
        own = torch.autograd.grad(expected.square().sum(), list(network.parameters()))
        torch.testing.assert_close([gradient[place] for gradient in gradients], list(own), rtol=1e-12, atol=1e-12)
        for name, buffer in network.named_buffers():
            torch.testing.assert_close(tensors[name][place], buffer, rtol=1e-12, atol=1e-12)


def test_a_layer_that_is_watched_by_a_hook_is_run_itself():
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    network[1].register_forward_hook(lambda *_: None)
    assert StackedNetwork(network).vmapped_layers() == ["ReLU"]


def test_a_subclass_of_a_known_layer_is_not_taken_for_it():
    class Shifted(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + 1

    network = nn.Sequential(Shifted(5, 4))
    assert StackedNetwork(network).vmapped_layers() == ["Shifted"]
    outputs = StackedNetwork(network)(stacked([network]), torch.ones(2, 5))
    torch.testing.assert_close(outputs[0], network(torch.ones(2, 5)))


def test_a_first_layer_that_works_in_place_leaves_the_batch_as_it_is():
    network = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 2))
    inputs = torch.randn(B, 5)
    before = inputs.clone()
    outputs = StackedNetwork(network)(stacked([network] * K), inputs)
    assert torch.equal(inputs, before)
    torch.testing.assert_close(outputs[0], network(before.clone()))
    assert network[0].inplace


def test_batch_norm_refuses_to_learn_from_one_sample_as_it_does_unstacked():
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        network(torch.randn(1, 5))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        StackedNetwork(network)(stacked([network] * K), torch.randn(1, 5))


CHAINS = ("linear", "linear alone", "no bias", "batch norm", "batch norm of plain statistics", "dropout", "nested")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("case", CHAINS)
def test_explicit_gradients_and_statistics_are_those_of_autograd(case, shared):
    make, shape, _ = NETWORKS[case]
    networks = members(make)
    inputs = torch.randn(*(() if shared else (K,)), B, *shape, dtype=torch.float64)
    skeleton = deepcopy(networks[0]).train()
    call = StackedNetwork(skeleton)
    names = [name for name, _ in networks[0].named_parameters()]
    by_graph, by_formula = stacked(networks), stacked(networks)
    outputs = call({name: by_graph[name].requires_grad_(name in names) for name in by_graph}, inputs, shared)
    slopes = torch.randn_like(outputs)
    expected = torch.autograd.grad(outputs, [by_graph[name] for name in names], slopes)
    gradients = {name: torch.full_like(by_formula[name], torch.nan) for name in names}
    for layer in stochastic_layers(skeleton):
        layer.calls = 0
    chain = explicit_chain(call, by_formula, gradients)
    assert chain is not None
    assert chain.accepts(inputs, shared)
    torch.testing.assert_close(chain.forward(inputs, shared), outputs.detach(), rtol=1e-12, atol=1e-12)
    chain.backward(slopes)
    torch.testing.assert_close(list(gradients.values()), list(expected), rtol=1e-10, atol=1e-12)
    for name, _ in networks[0].named_buffers():
        torch.testing.assert_close(by_formula[name], by_graph[name])


@pytest.mark.parametrize("case", sorted(NETWORKS.keys() - {*CHAINS, "rows of vectors"}))
def test_networks_with_other_layers_are_left_to_autograd(case):
    networks = members(NETWORKS[case][0])
    assert explicit_chain(StackedNetwork(networks[0]), stacked(networks), {}) is None


def test_an_explicit_chain_takes_vectors_and_more_than_one_of_them():
    network = NETWORKS["rows of vectors"][0]()
    chain = explicit_chain(StackedNetwork(network), stacked([network]), {})
    assert chain is not None
    assert not chain.accepts(torch.zeros(B, 3, 5), shared=True)
    assert not chain.accepts(torch.zeros(1, 5), shared=True)
    assert chain.accepts(torch.zeros(2, 5), shared=True)
