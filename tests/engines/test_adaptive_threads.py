"""The number of threads of large stacks: soon the faster one, seldom tried anew, and never seen in the results."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.engine_training import B, M, member_states, method, model, settings

from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.core.threads import threads
from ensemblekit.data.loading import Batch
from ensemblekit.engines import adaptive_threads, stacked
from ensemblekit.engines.adaptive_threads import AdaptiveThreads
from ensemblekit.engines.explicit_chain import ExplicitChain
from ensemblekit.engines.stacked import StackedEngine
from ensemblekit.members.build import build_members
from ensemblekit.members.state import MemberState


class Machine:
    """Steps take the seconds of the present state of the machine, by whether they have one thread."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.seconds = {False: 0.003, True: 0.006}
        monkeypatch.setattr(adaptive_threads.time, "perf_counter", lambda: self.now)
        self.adaptive = AdaptiveThreads()

    def train(self, seconds: float, may_use_one: bool = True, noise: float = 0.0) -> list[bool]:
        """Train for so long; returns of each step whether it had one thread."""
        source, end, steps = random.Random(0), self.now + seconds, []
        with threads(2):
            while self.now < end:
                with self.adaptive.step(lambda: may_use_one):
                    steps.append(torch.get_num_threads() == 1)
                    self.now += self.seconds[steps[-1]] * (1 + noise * source.random())
        return steps


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_on_an_idle_machine_nearly_all_steps_use_all_threads(machine):
    steps = machine.train(60)
    assert 0 < sum(steps) / len(steps) < 0.02
    assert machine.now / len(steps) < 1.02 * machine.seconds[False]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_on_a_busy_machine_one_thread_takes_over_and_stays(machine, noise):
    machine.seconds = {False: 0.06, True: 0.015}
    machine.train(1.5, noise=noise)
    steps = machine.train(60, noise=noise)
    assert sum(steps) / len(steps) > 0.98


def test_a_machine_that_becomes_busy_is_noticed_within_a_few_steps(machine):
    machine.train(5)
    machine.seconds = {False: 0.06, True: 0.015}
    steps = machine.train(5)
    assert all(steps[adaptive_threads.SLOW_STEPS + 2 * adaptive_threads.STEPS_OF_TRIAL :])


def test_all_threads_come_back_when_the_machine_is_idle_again(machine):
    machine.seconds = {False: 0.06, True: 0.015}
    machine.train(10)
    machine.seconds = {False: 0.003, True: 0.006}
    machine.train(adaptive_threads.LONGEST_INTERVAL_SECONDS + 1)
    assert sum(machine.train(2)) < 30  # of about 600


def test_single_slow_steps_change_nothing(machine):
    machine.train(5)
    for _ in range(20):
        machine.seconds = {False: 0.3, True: 0.3}
        machine.train(0.1)
        machine.seconds = {False: 0.003, True: 0.006}
        machine.train(0.1)
    assert not machine.adaptive.uses_one


def test_one_thread_is_not_used_for_a_small_gain(machine):
    machine.seconds = {False: 0.0069, True: 0.006}
    machine.train(5)
    assert not machine.adaptive.uses_one


def test_one_thread_is_never_used_where_it_would_change_the_results(machine):
    machine.seconds = {False: 0.06, True: 0.015}
    assert not any(machine.train(5, may_use_one=False))


class InTurn(AdaptiveThreads):
    """Uses one thread and all threads in turn, wherever it may."""

    def step(self, may_use_one):
        self.uses_one, self.next_trial = not self.uses_one, float("inf")
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
