"""The choice of an engine: right, and soon; also where steps are disturbed or only small parts of them can be timed."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import ensemblekit as ek
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines import selection, timed_steps, trials
from ensemblekit.engines.base import Engine
from ensemblekit.engines.selection import Choice
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.timed_steps import Work
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

    def engine(
        self,
        name: str,
        for_each_sample: float,
        fixed: float = 0.0,
        delays: Iterable[float] = (),
        first_step: float = 1.0,
    ) -> type[Engine]:
        """An engine that takes this time; `delays` are added to its steps, one after the other.

        The first step of each size takes `first_step` times as long.
        """
        clock, later = self, itertools.chain(delays, itertools.repeat(0.0))

        class Timed:
            """Takes the time that it is told to take."""

            settings = EngineSettings(torch.device("cpu"), SGD)

            def __init__(self, members, objective, settings) -> None:
                self.members = members
                self.sizes: set[int] = set()

            @classmethod
            def unsupported(cls, members, settings) -> None:
                return None

            def train_step(self, batch, weights, learning_rate, step):
                assert weights is None or weights.shape == (len(batch.index), len(self.members))
                clock.steps.append((name, len(self.members), len(batch.index)))
                seconds = fixed + for_each_sample * len(self.members) * len(batch.index)
                clock.now += seconds * (1.0 if len(batch.index) in self.sizes else first_step) + next(later)
                self.sizes.add(len(batch.index))
                if for_each_sample == float("inf"):
                    raise MemoryError
                return torch.zeros(()), torch.zeros(1)

            def close(self) -> None:
                pass

        return Timed  # type: ignore[return-value]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timed_steps.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(trials, "num_cores", lambda: 2)
    return made


def choose(
    monkeypatch,
    engines: dict[str, type[Engine]],
    weights: bool = False,
    frozen: int = 0,
    convolves: bool = False,
    num_steps: int | None = None,
) -> Choice:
    monkeypatch.setattr(selection, "ENGINES", engines)
    monkeypatch.setattr(selection, "engine_class", engines.__getitem__)
    model = ek.models()["mlp"].load()(hidden=(2,))
    networks = build_members([model] * M, (3,), 2, 0)
    if convolves:
        networks[0].append(nn.Conv2d(1, 1, 1))
    members = [MemberState(network, model, index, frozen=index < frozen) for index, network in enumerate(networks)]
    batch = Batch(torch.zeros(B, 3), torch.zeros(B, dtype=torch.int64), torch.arange(B))
    settings = EngineSettings(torch.device("cpu"), SGD)
    weighted = torch.ones(B, M) if weights else None
    work = Work(members, Objective([], CrossEntropy()), settings, batch, weighted, num_steps)
    return selection.choose_engine(work)


@pytest.mark.parametrize("weights", [False, True])
def test_small_steps_are_measured_whole(clock, monkeypatch, weights):
    engines = {"threaded": clock.engine("threaded", 3e-6), "sequential": clock.engine("sequential", 4e-6)}
    choice = choose(monkeypatch, engines, weights)
    assert choice.seconds_per_step == pytest.approx({"threaded": 3e-6 * M * B, "sequential": 4e-6 * M * B})
    assert ("threaded", M, B) in clock.steps


def test_what_is_slow_only_because_it_starts_slowly_is_not_given_up_too_early(clock, monkeypatch):
    engines = {
        "threaded": clock.engine("threaded", 1e-6, fixed=1e-3),
        "sequential": clock.engine("sequential", 2e-6),
    }
    assert choose(monkeypatch, engines).engine == "threaded"


def test_large_steps_are_extrapolated_with_their_fixed_part(clock, monkeypatch):
    """Stacked would be faster by the ratio of the small parts; whole steps take too long to be tried."""
    engines = {
        "threaded": clock.engine("threaded", 5e-4, fixed=0.04),
        "stacked": clock.engine("stacked", 9e-4),
    }
    choice = choose(monkeypatch, engines)
    assert choice.engine == "threaded"
    assert max(samples for _, _, samples in clock.steps) == 32
    few = M // 4  # the fixed part counts for each four members
    expected = {"threaded": 5e-4 * M * B + 0.04 * few, "stacked": 9e-4 * M * B}
    assert choice.seconds_per_step == pytest.approx(expected)


def test_an_engine_that_falls_far_behind_is_not_tried_on_whole_steps(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", 2e-3), "stacked": clock.engine("stacked", 6e-3)}
    assert choose(monkeypatch, engines).engine == "threaded"
    assert {samples for name, _, samples in clock.steps if name == "stacked"} == {8}


@pytest.mark.parametrize("for_each_sample", [1e-6, 1e-5, 1e-4, 1e-3, 4e-3])
def test_trying_ends_within_its_time_however_large_the_networks_are(clock, monkeypatch, for_each_sample):
    engines = {
        "threaded": clock.engine("threaded", for_each_sample),
        "stacked": clock.engine("stacked", 1.8 * for_each_sample),
        "sequential": clock.engine("sequential", 1.4 * for_each_sample),
    }
    assert choose(monkeypatch, engines, convolves=True).engine == "threaded"
    assert clock.now <= trials.TIME_LIMIT_SECONDS


@pytest.mark.parametrize("for_each_sample", [2e-5, 4e-5, 6e-5, 8e-5, 1.1e-4, 2e-4])
def test_slow_first_steps_do_not_exceed_the_time(clock, monkeypatch, for_each_sample):
    """The first step of a size takes 3 to 5 times as long as the others."""
    engines = {
        name: clock.engine(name, factor * for_each_sample, first_step=5.0)
        for name, factor in (("threaded", 1.0), ("stacked", 1.8), ("sequential", 1.4))
    }
    assert choose(monkeypatch, engines, convolves=True).engine == "threaded"
    assert clock.now <= trials.TIME_LIMIT_SECONDS


@pytest.mark.parametrize("convolves", [False, True])
def test_if_even_the_smallest_part_takes_too_long_the_layers_decide(clock, monkeypatch, convolves):
    engines = {name: clock.engine(name, 1.0) for name in ("threaded", "stacked", "sequential")}
    choice = choose(monkeypatch, engines, convolves=convolves)
    assert choice.engine == ("threaded" if convolves else "stacked")
    assert len(clock.steps) == 1


@pytest.mark.parametrize("convolves", [False, True])
def test_between_engines_that_are_equally_fast_the_layers_decide(clock, monkeypatch, convolves):
    engines = {name: clock.engine(name, 1e-5) for name in ("threaded", "stacked", "sequential")}
    assert choose(monkeypatch, engines, convolves=convolves).engine == ("threaded" if convolves else "stacked")


@pytest.mark.parametrize("convolves", [False, True])
def test_an_engine_that_is_faster_against_expectations_is_taken(clock, monkeypatch, convolves):
    engines = {"threaded": clock.engine("threaded", 1e-5), "stacked": clock.engine("stacked", 1e-5)}
    faster = "stacked" if convolves else "threaded"
    engines[faster] = clock.engine(faster, 0.9e-5)
    assert choose(monkeypatch, engines, convolves=convolves).engine == faster


@pytest.mark.parametrize("disturbed", range(12))
def test_one_step_that_something_else_has_slowed_down_decides_nothing(clock, monkeypatch, disturbed):
    delays = [0.0] * disturbed + [0.5]
    threaded = clock.engine("threaded", 1e-5, delays=delays)
    engines = {"threaded": threaded, "sequential": clock.engine("sequential", 1.3e-5)}
    assert choose(monkeypatch, engines).engine == "threaded"


@pytest.mark.parametrize("fastest", ["threaded", "stacked"])
def test_a_machine_that_is_busy_does_not_mislead(clock, monkeypatch, fastest):
    """Every third step takes up to five times as long, and the fastest engine is 1.5 times as fast as the others."""
    source = random.Random(0)
    for repetition in range(20):
        clock.now = 0.0
        engines = {}
        for name in ("threaded", "stacked", "sequential"):
            seconds = 1e-5 if name == fastest else 1.5e-5
            delays = [4 * seconds * M * B * source.random() * (source.random() < 1 / 3) for _ in range(50)]
            engines[name] = clock.engine(name, seconds, delays=delays)
        assert choose(monkeypatch, engines, convolves=fastest == "threaded").engine == fastest, repetition


def test_a_short_run_is_not_held_up(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", 1e-4), "sequential": clock.engine("sequential", 1.1e-4)}
    assert choose(monkeypatch, engines, num_steps=20).engine == "threaded"
    run = 20 * 1e-4 * M * B
    assert clock.now <= 1.5 * trials.SHARE_OF_RUN * run
    short = clock.now
    clock.now = 0.0
    choose(monkeypatch, engines, num_steps=10_000)
    assert clock.now > 2 * short


def test_frozen_members_are_tried_with_the_one_that_learns(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", 1e-6), "sequential": clock.engine("sequential", 2e-6)}
    choose(monkeypatch, engines, frozen=M - 1)
    assert {members for _, members, _ in clock.steps} == {M}


def test_an_engine_that_runs_out_of_memory_is_left_out(clock, monkeypatch):
    engines = {"threaded": clock.engine("threaded", float("inf")), "sequential": clock.engine("sequential", 1e-6)}
    monkeypatch.setattr(timed_steps.time, "perf_counter", lambda: 0.0)
    assert list(choose(monkeypatch, engines).seconds_per_step) == ["sequential"]


def test_where_there_is_nothing_to_choose_nothing_is_tried(clock, monkeypatch):
    assert choose(monkeypatch, {"sequential": clock.engine("sequential", 1.0)}) == Choice("sequential", {})
    assert clock.steps == []


def test_training_imports_no_compiler_and_no_sympy(tmp_path):
    code = (
        "import sys, ensemblekit as ek\n"
        "for name in ('auto', 'sequential', 'threaded', 'stacked'):\n"
        "    tables = {'data': 'digits', 'model': 'mlp', 'method': 'gncl'}\n"
        "    spec = ek.load_spec(tables, {'engine.name': name, 'training.epochs': 1, 'ensemble.members': 2})\n"
        "    ek.train(spec, out=f'{sys.argv[1]}/{name}', progress=False)\n"
        "slow = {'sympy', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
