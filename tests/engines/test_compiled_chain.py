"""Compiled steps of linear layers, batch norm and ReLU: those of autograd, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from helpers.compiled_code import VERSIONS, needs_compiled_code, version
from helpers.engine_training import method, model, settings
from torch import Tensor, nn

from ensemblekit.core import kernels
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.core.threads import threads
from ensemblekit.data.loading import Batch
from ensemblekit.engines import compiled_chain as module
from ensemblekit.engines.compiled_chain import WIDEST, CompiledChain, compiled_chain
from ensemblekit.engines.explicit_chain import ExplicitChain
from ensemblekit.engines.stacked import StackedEngine
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.build import build_members
from ensemblekit.members.state import MemberState

pytestmark = needs_compiled_code
K = 3


def layers(*widths: int, norm: bool = True, affine: bool = True, bias: bool = True, relu: bool = True) -> nn.Module:
    """An MLP with these widths."""
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts.append(nn.Linear(inputs, outputs, bias=bias))
        parts += [nn.BatchNorm1d(outputs, affine=affine, momentum=0.3, eps=1e-3)] if norm else []
        parts += [nn.ReLU()] if relu else []
    return nn.Sequential(*parts, nn.Linear(widths[-1], 5))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "usual": (lambda: layers(64, 64, 64), (64,)),
    "images": (lambda: nn.Sequential(nn.Flatten(), layers(48, 20)), (3, 4, 4)),
    "one layer": (lambda: nn.Linear(9, 4), (9,)),
    "odd widths": (lambda: layers(7, 33, 1, 129, 17), (7,)),
    "wide": (lambda: layers(31, WIDEST, 40), (31,)),
    "without norm": (lambda: layers(20, 30, norm=False), (20,)),
    "without bias": (lambda: layers(20, 30, bias=False), (20,)),
    "plain statistics": (lambda: layers(20, 30, affine=False), (20,)),
    "linear only": (lambda: layers(20, 30, 8, norm=False, relu=False), (20,)),
    "ReLU at the end": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()), (6,)),
    "norm at the end": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.BatchNorm1d(3)), (6,)),
    "flattened twice": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Flatten(), nn.ReLU(), nn.Linear(4, 2)), (6,)),
}


class Stacked:
    """K networks with other weights each, stacked, and their chain."""

    def __init__(self, make: Callable[[], nn.Module], num_members: int = K, frozen: str = "") -> None:
        torch.manual_seed(0)
        self.networks = [make().train() for _ in range(num_members)]
        for network in self.networks:
            for value in network.parameters():
                nn.init.normal_(value, 0.1, 0.3)
        states = [network.state_dict() for network in self.networks]
        self.tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        names = [name for name, _ in self.networks[0].named_parameters() if name != frozen]
        self.gradients = {name: torch.full_like(self.tensors[name], torch.nan) for name in names}
        self.chain = compiled_chain(StackedNetwork(deepcopy(self.networks[0])), self.tensors, self.gradients)


def exact(networks: list[nn.Module], inputs: Tensor, slopes: Tensor, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and gradients by autograd in double precision; also updates the statistics of the networks."""
    outputs = []
    for index, network in enumerate(networks):
        network.double()
        result = network(inputs.double() if shared else inputs[index].double())
        result.backward(slopes[index].double())
        outputs.append(result.detach())
    names = [name for name, _ in networks[0].named_parameters()]
    return torch.stack(outputs), {
        name: torch.stack([network.get_parameter(name).grad for network in networks]) for name in names
    }


def assert_close(found: Tensor, expected: Tensor) -> None:
    """In the mean over all values: a ReLU near 0 may be open in one precision and closed in another."""
    error, size = (found - expected).norm(), expected.norm()
    assert error <= 1e-2 * size + 1e-4 * expected.numel() ** 0.5, f"error {error:.2g} of {size:.2g}"


@pytest.mark.parametrize("batch", [2, 7, 64, 150])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("case", NETWORKS)
def test_outputs_gradients_and_statistics_are_those_of_autograd(case, shared, batch):
    make, shape = NETWORKS[case]
    for highest in VERSIONS:
        stacked = Stacked(make)
        inputs = torch.randn(*(() if shared else (K,)), batch, *shape)
        assert stacked.chain is not None
        assert stacked.chain.accepts(inputs, shared)
        with version(highest):
            outputs = stacked.chain.forward(inputs, shared)
            slopes = torch.randn(outputs.shape)
            stacked.chain.backward(slopes.transpose(1, 2).contiguous().transpose(1, 2))
        expected, gradients = exact(stacked.networks, inputs, slopes, shared)
        assert_close(outputs, expected)
        for name, gradient in gradients.items():
            assert_close(stacked.gradients[name], gradient)
        for name, _ in stacked.networks[0].named_buffers():
            buffers = torch.stack([network.get_buffer(name) for network in stacked.networks])
            assert_close(stacked.tensors[name], buffers.double())


@pytest.mark.parametrize("case", ["linear only", "norm only"])
def test_without_relu_every_single_value_is_right(case):
    stacked = Stacked(lambda: layers(20, 30, 50, norm=case == "norm only", relu=False))
    inputs = torch.randn(64, 20)
    outputs = stacked.chain.forward(inputs, True)
    slopes = torch.randn(outputs.shape)
    stacked.chain.backward(slopes)
    expected, gradients = exact(stacked.networks, inputs, slopes, True)
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        largest = float(gradient.abs().max()) + 1
        torch.testing.assert_close(stacked.gradients[name].double(), gradient, rtol=1e-5, atol=1e-5 * largest)


def test_frozen_parameters_get_no_gradient():
    stacked = Stacked(lambda: layers(6, 4), frozen="0.weight")
    before = stacked.tensors["0.weight"].clone()
    outputs = stacked.chain.forward(torch.randn(5, 6), True)
    stacked.chain.backward(torch.ones_like(outputs))
    assert "0.weight" not in stacked.gradients
    assert torch.equal(stacked.tensors["0.weight"], before)
    assert all(gradient.isfinite().all() for gradient in stacked.gradients.values())


def test_nan_in_the_inputs_of_one_member_stays_there_and_is_seen():
    stacked = Stacked(lambda: layers(6, 4))
    inputs = torch.randn(K, 5, 6)
    inputs[1, 2, 3] = torch.nan
    outputs = stacked.chain.forward(inputs, False)
    assert outputs[1].isnan().any()
    assert outputs[[0, 2]].isfinite().all()


def test_earlier_outputs_are_not_overwritten():
    stacked = Stacked(lambda: layers(6, 4))
    first = stacked.chain.forward(torch.randn(5, 6), True)
    kept = first.clone()
    stacked.chain.forward(torch.randn(5, 6), True)
    assert torch.equal(first, kept)


REFUSED = {
    "too wide": lambda: layers(6, WIDEST + 1),
    "another activation": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "norm first": lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)),
    "ReLU before the norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "two norms": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten(), nn.Linear(4, 2)),
    "no layer": lambda: nn.Sequential(nn.Flatten()),
    "double precision": lambda: layers(5, 4).double(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_networks_are_left_to_other_code(case):
    assert Stacked(REFUSED[case]).chain is None


def test_it_takes_vectors_and_more_than_one_of_them():
    chain = Stacked(lambda: layers(5, 4)).chain
    assert chain.accepts(torch.zeros(2, 5), shared=True)
    assert not chain.accepts(torch.zeros(1, 5), shared=True)
    assert not chain.accepts(torch.zeros(2, 3, 5), shared=True)
    assert not chain.accepts(torch.zeros(2, 5, dtype=torch.float64), shared=True)


@contextmanager
def several_threads(number: int, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(module, "FLOPS_FOR_THREADS", 0)
    with threads(number):
        yield


def new_engine() -> StackedEngine:
    base = model("mlp", hidden=(20, 70))
    networks = build_members([base] * 11, (30,), 3, seed=0)
    members = [MemberState(network, base, index) for index, network in enumerate(networks)]
    engine = StackedEngine(members, Objective([method({"name": "gncl"})], CrossEntropy()), settings())
    assert isinstance(engine.parts[0].chain, CompiledChain)
    return engine


def trained(engine: StackedEngine) -> list[Tensor]:
    """The outputs of some steps with batches of two sizes, and those of predictions afterwards."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(6, 40, 30, generator=source)
    outputs = []
    for step, rows in enumerate([*data, data[0, :13]]):
        index = torch.arange(len(rows))
        outputs.append(engine.train_step(Batch(rows, index % 3, index), None, 0.01, step)[1])
    return [*outputs, engine.predict(data[0])]


@pytest.mark.parametrize("number", [2, 3, 100])
def test_the_bits_do_not_depend_on_the_number_of_threads(number, monkeypatch):
    expected = trained(new_engine())
    with several_threads(number, monkeypatch):
        assert all(map(torch.equal, trained(new_engine()), expected))


def test_several_trainings_at_once_do_not_disturb_each_other(monkeypatch):
    expected = trained(new_engine())
    with several_threads(2, monkeypatch), ThreadPoolExecutor(4) as pool:
        for found in pool.map(trained, [new_engine() for _ in range(12)]):
            assert all(map(torch.equal, found, expected))


def test_small_passes_are_computed_by_one_thread(monkeypatch):
    with threads(2):
        for flops, expected in ((1e12, 1), (0, 2)):
            monkeypatch.setattr(module, "FLOPS_FOR_THREADS", flops)
            chain = Stacked(lambda: layers(6, 4)).chain
            chain.forward(torch.randn(5, 6), True)
            assert chain.memory.num_threads == expected


def test_without_compiled_code_steps_are_computed_by_torch(monkeypatch):
    expected = trained(new_engine())
    monkeypatch.setattr(kernels, "library", lambda: None)
    monkeypatch.setattr(f"{__name__}.CompiledChain", ExplicitChain)
    for found, compiled in zip(trained(new_engine()), expected, strict=True):
        torch.testing.assert_close(found, compiled, rtol=1e-3, atol=1e-4)
