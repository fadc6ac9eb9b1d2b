"""The number of threads of large stacks is never seen in the results."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.engine_training import B, M, member_states, method, model, settings

from ensemblekit.core.adaptive_threads import AdaptiveThreads
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.core.threads import threads
from ensemblekit.data.loading import Batch
from ensemblekit.engines import stacked
from ensemblekit.engines.explicit_chain import ExplicitChain
from ensemblekit.engines.stacked import StackedEngine
from ensemblekit.members.build import build_members
from ensemblekit.members.state import MemberState


class InTurn(AdaptiveThreads):
    """Uses one thread and all threads in turn, wherever it may."""

    def step(self, may_use_one):
        self.uses_one, self.next_trial = not self.uses_one, math.inf
        return super().step(may_use_one)


def trained(hidden: tuple[int, ...], inputs: int, samples: int, adaptive: AdaptiveThreads | None) -> torch.Tensor:
    """The outputs after a few steps of a stack that uses the threads in this way; None: all."""
    base = model("mlp", hidden=hidden, dropout=0.2)
    networks = build_members([base] * 48, (inputs,), 3, seed=0)
    members = [MemberState(network, base, index) for index, network in enumerate(networks)]
    engine = StackedEngine(members, Objective([method({"name": "gncl"})], CrossEntropy()), settings("adam"))
    assert engine.adaptive is not None
    engine.adaptive = adaptive
    source = torch.Generator().manual_seed(0)
    data = torch.randn(4, samples, inputs, generator=source)
    for step, rows in enumerate([*data, data[0, : samples // 3]]):
        index = torch.arange(len(rows))
        engine.train_step(Batch(rows, index % 3, index), None, 0.01, step)
    if isinstance(adaptive, InTurn) and not any(engine.same_with_one_thread.values()):
        pytest.skip("the library for matrix products divides these sums among threads, so that all threads are used")
    return engine.predict(data[0])


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize(
    ("hidden", "inputs", "samples"), [((64, 64), 64, 64), ((33,), 501, 100), ((129, 17), 40, 7), ((70,), 160, 128)]
)
def test_the_bits_do_not_depend_on_the_number_of_threads(hidden, inputs, samples, number, monkeypatch):
    monkeypatch.setattr(stacked, "PARAMETERS_FOR_THREADS", 100_000)
    with threads(number):
        expected = trained(hidden, inputs, samples, None)
        assert torch.equal(trained(hidden, inputs, samples, InTurn()), expected)


def test_products_that_depend_on_the_number_of_threads_are_noticed(monkeypatch):
    """A library may sum in another order if it divides a product among threads."""
    base = model("mlp", hidden=(8,))
    monkeypatch.setattr(stacked, "PARAMETERS_FOR_THREADS", 0)
    engine = StackedEngine(member_states([base] * M), Objective([], CrossEntropy()), settings())
    chain = engine.parts[0].chain
    assert isinstance(chain, ExplicitChain)
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args: addmm(*args) + 1e-6 * torch.get_num_threads())
    with threads(2):
        assert not chain.is_same_with_one_thread(B, shared=True)
        monkeypatch.undo()
        assert chain.is_same_with_one_thread(B, shared=True)


def test_only_large_stacks_of_known_layers_choose_their_threads(monkeypatch):
    objective = Objective([], CrossEntropy())
    members = member_states([model("mlp", hidden=(8,))] * M)
    assert StackedEngine(members, objective, settings()).adaptive is None
    monkeypatch.setattr(stacked, "PARAMETERS_FOR_THREADS", 0)
    assert StackedEngine(members, objective, settings()).adaptive is not None
    convolutions = member_states([model("resnet", width=4, blocks=2)] * M)
    assert StackedEngine(convolutions, objective, settings()).adaptive is None
