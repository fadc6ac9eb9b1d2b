"""The choice of an engine: right, and soon."""

from __future__ import annotations

import pytest
import torch

import ensemblekit as ek
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines import selection
from ensemblekit.engines.base import Engine
from ensemblekit.engines.selection import Work
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.build import build_members
from ensemblekit.members.state import MemberState
from ensemblekit.spec.optimizers import optimizer_section

M, B = 16, 128
SGD = optimizer_section("sgd").from_table({"name": "sgd", "lr": 0.1})


class Clock:
    """A clock that only engines move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[tuple[str, int, int]] = []

    def engine(self, name: str, for_each_sample: float, fixed: float = 0.0) -> type[Engine]:
        clock = self

        class Timed:
            """Takes the time that it is told to take."""

            settings = EngineSettings(torch.device("cpu"), SGD)

            def __init__(self, members, objective, settings) -> None:
                self.members = members

            @classmethod
            def unsupported(cls, members, settings) -> None:
                return None

            def train_step(self, batch, weights, learning_rate, step):
                assert weights is None or weights.shape == (len(batch.index), len(self.members))
                clock.steps.append((name, len(self.members), len(batch.index)))
                clock.now += fixed + for_each_sample * len(self.members) * len(batch.index)
                if for_each_sample == float("inf"):
                    raise MemoryError
                return torch.zeros(()), torch.zeros(1)

            def close(self) -> None:
                pass

        return Timed  # type: ignore[return-value]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(selection.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(selection, "num_cores", lambda: 2)
    return made


def measure(monkeypatch, engines: dict[str, type[Engine]], weights: bool = False, frozen: int = 0) -> dict[str, float]:
    monkeypatch.setattr(selection, "ENGINES", engines)
    monkeypatch.setattr(selection, "engine_class", engines.__getitem__)
    model = ek.models()["mlp"].load()(hidden=(2,))
    networks = build_members([model] * M, (3,), 2, 0)
    members = [MemberState(network, model, index, frozen=index < frozen) for index, network in enumerate(networks)]
    batch = Batch(torch.zeros(B, 3), torch.zeros(B, dtype=torch.int64), torch.arange(B))
    settings = EngineSettings(torch.device("cpu"), SGD)
    weighted = torch.ones(B, M) if weights else None
    return selection.measure_engines(Work(members, Objective([], CrossEntropy()), settings, batch, weighted))


@pytest.mark.parametrize("weights", [False, True])
def test_small_steps_are_measured_whole(clock, monkeypatch, weights):
    engines = {"threaded": clock.engine("threaded", 3e-6), "sequential": clock.engine("sequential", 4e-6)}
    found = measure(monkeypatch, engines, weights)
    assert found == pytest.approx({"threaded": 3e-6 * M * B, "sequential": 4e-6 * M * B})
    assert ("threaded", M, B) in clock.steps


def test_what_is_slow_only_because_it_starts_slowly_is_not_given_up_too_early(clock, monkeypatch):
    engines = {
        "threaded": clock.engine("threaded", 1e-6, fixed=1e-3),
        "sequential": clock.engine("sequential", 2e-6),
    }
    found = measure(monkeypatch, engines)
    assert min(found, key=found.__getitem__) == "threaded"


def test_an_engine_that_falls_far_behind_is_not_tried_on_whole_steps(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", 2e-3), "stacked": clock.engine("stacked", 6e-3)}
    assert list(measure(monkeypatch, engines)) == ["threaded"]
    assert max(samples for name, _, samples in clock.steps if name == "stacked") == selection.SAMPLES[0]


@pytest.mark.parametrize("for_each_sample", [1e-6, 1e-5, 1e-4, 1e-3, 4e-3])
def test_trying_ends_within_its_time_however_large_the_networks_are(clock, monkeypatch, for_each_sample):
    engines = {
        "threaded": clock.engine("threaded", for_each_sample),
        "stacked": clock.engine("stacked", 1.8 * for_each_sample),
        "sequential": clock.engine("sequential", 1.3 * for_each_sample),
    }
    found = measure(monkeypatch, engines)
    assert min(found, key=found.__getitem__) == "threaded"
    assert clock.now <= selection.TIME_LIMIT_SECONDS


def test_one_step_that_something_else_has_slowed_down_decides_nothing(clock, monkeypatch):
    class Disturbed(clock.engine("threaded", 2.2e-3)):
        def train_step(self, batch, *others):
            if clock.steps.count(("threaded", 4, 32)) == 1 and len(batch.index) == 32:
                clock.now += 1.0
            return super().train_step(batch, *others)

    found = measure(monkeypatch, {"threaded": Disturbed, "sequential": clock.engine("sequential", 2.9e-3)})
    assert clock.steps.count(("threaded", 4, 32)) == 2
    assert min(found, key=found.__getitem__) == "threaded"


def test_frozen_members_are_tried_with_the_one_that_learns(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", 1e-6), "sequential": clock.engine("sequential", 2e-6)}
    measure(monkeypatch, engines, frozen=M - 1)
    assert {members for _, members, _ in clock.steps} == {M}


def test_an_engine_that_runs_out_of_memory_is_left_out(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", float("inf")), "sequential": clock.engine("sequential", 1e-6)}
    monkeypatch.setattr(selection.time, "perf_counter", lambda: 0.0)
    assert list(measure(monkeypatch, engines)) == ["sequential"]


def test_where_there_is_nothing_to_choose_nothing_is_tried(clock, monkeypatch):
    assert measure(monkeypatch, {"sequential": clock.engine("sequential", 1.0)}) == {}
    assert clock.steps == []
