"""The choice between one thread and all: soon the faster one, and seldom tried anew; with a clock of the test's own."""

from __future__ import annotations

import random

import pytest
import torch

from ensemblekit.core import adaptive_threads
from ensemblekit.core.adaptive_threads import SETTLING_STEPS, STEPS, STEPS_OF_TRIAL, AdaptiveThreads
from ensemblekit.core.threads import threads


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
    assert all(steps[2 * STEPS_OF_TRIAL :])


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


def test_steps_that_are_slow_only_after_a_change_do_not_decide(machine):
    """Threads that were not used for a while take some steps to settle."""
    machine.seconds = {False: 0.008, True: 0.012}
    machine.train(2)
    assert not machine.adaptive.uses_one
    machine.adaptive.uses_one, machine.adaptive.next_trial = True, machine.now
    machine.adaptive.recent.extend([0.012] * STEPS)
    with threads(2):
        for number in range(SETTLING_STEPS + STEPS):
            with machine.adaptive.step(lambda: True):
                assert torch.get_num_threads() == 2
                machine.now += 0.045 if number < 10 else 0.008
    assert not machine.adaptive.uses_one


def test_a_trial_that_may_not_use_one_thread_ends(machine):
    machine.train(2, may_use_one=False)
    assert machine.adaptive.trial is None
    assert machine.adaptive.next_trial > machine.now + 10


def test_a_program_that_starts_does_not_lead_to_one_thread_if_all_threads_settle_soon(machine):
    machine.train(5)
    with threads(2):
        for number in range(400):
            with machine.adaptive.step(lambda: True):
                machine.now += 0.011 if torch.get_num_threads() == 1 else 0.045 if number < 10 else 0.008
    assert not machine.adaptive.uses_one
