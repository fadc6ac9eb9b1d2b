"""A machine that is busy with other work is noticed, once, with what would help."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ensemblekit.core.threads import threads
from ensemblekit.training import busy_machine
from ensemblekit.training.busy_machine import MEASURED_SECONDS, BusyMachine

CPU = torch.device("cpu")


class Clocks:
    """Clocks that are set by hand: a second passes in each step, of which the threads get a share each."""

    def __init__(self, monkeypatch) -> None:
        self.wall = self.thread = self.process = 0.0
        monkeypatch.setattr(busy_machine.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(busy_machine.time, "thread_time", lambda: self.thread)
        monkeypatch.setattr(busy_machine.time, "process_time", lambda: self.process)
        monkeypatch.setattr(busy_machine, "num_cores", lambda: 2)

    def train(self, machine: BusyMachine, engine, share: float, workers: int, steps: int = 20) -> list[str]:
        said = []
        for _ in range(steps):
            with machine.step(engine):
                self.wall += 1.0
                self.thread += share
                self.process += share * workers
            if text := machine.notice(engine):
                said.append(text)
        return said


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    return Clocks(monkeypatch)


def engine(name: str, members: int = 4, limits_threads: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, active=[None] * members, limits_threads=limits_threads)


@pytest.mark.parametrize(("name", "workers"), [("sequential", 1), ("stacked", 1), ("threaded", 2)])
def test_a_busy_machine_is_said_once(name, workers, clocks):
    with threads(2):
        (text,) = clocks.train(BusyMachine(CPU), engine(name), share=0.4, workers=workers)
    assert "training gets 40 % of the processor time it needs" in text
    assert ("OMP_NUM_THREADS=1" in text) == (name != "threaded")


def test_fewer_threads_are_not_suggested_to_an_engine_that_limits_them(clocks):
    with threads(2):
        (text,) = clocks.train(BusyMachine(CPU), engine("stacked", limits_threads=True), share=0.4, workers=1)
    assert "OMP_NUM_THREADS" not in text


@pytest.mark.parametrize(("name", "workers"), [("sequential", 1), ("stacked", 1), ("threaded", 2)])
def test_nothing_is_said_of_an_idle_machine(name, workers, clocks):
    assert clocks.train(BusyMachine(CPU), engine(name), share=0.9, workers=workers) == []


def test_threads_that_wait_for_the_last_member_do_not_count_as_busy(clocks):
    """Three members on two cores: one core is idle for half of the time."""
    assert clocks.train(BusyMachine(CPU), engine("threaded", members=3), share=0.75, workers=2) == []


def test_it_is_not_decided_before_enough_time_was_measured(clocks):
    steps = int(MEASURED_SECONDS) - 1
    assert clocks.train(BusyMachine(CPU), engine("stacked"), share=0.1, workers=1, steps=steps) == []


def test_nothing_is_measured_on_other_devices(clocks):
    assert clocks.train(BusyMachine(torch.device("meta")), engine("stacked"), share=0.0, workers=1) == []
