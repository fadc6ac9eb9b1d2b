"""Runs on several ranks equal those in one process, and can be resumed with any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.extending_plugins import CASES, PLUGINS
from helpers.small_runs import Crash, CrashAfter, assert_same_run, small_spec, training
from safetensors.torch import load_file

import ensemblekit as ek
from ensemblekit.engines import selection
from ensemblekit.engines.timed_steps import Work
from ensemblekit.ranks.session import joined_ranks
from ensemblekit.testing.several_ranks import run_on_ranks

SEQUENTIAL = {"name": "sequential", "device": "cpu"}
GROUPS = [
    {"members": 2, "model": {"name": "mlp", "hidden": [24], "dropout": 0.2}},
    {"members": 1, "model": {"name": "resnet", "width": 2, "blocks": 1}},
]
EXACT = {
    "stochastic layers": {"method": "gncl"},
    "second inputs": {"method": "adversarial"},
    "second weights": CASES["sharp with gncl"],
    "sample weights": {"method": "bagging"},
    "recompute": {"method": "gncl", "engine": {**SEQUENTIAL, "recompute": True}},
    "bf16": {"method": "gncl", "engine": {**SEQUENTIAL, "precision": "bf16"}},
    "a family, and a rank without a network": {"method": "gncl", "model": {"name": "tabm", "hidden": [8]}},
    "an auxiliary network": CASES["gate"],
    "a student": CASES["student"],
    "different models": {"method": "gncl", "ensemble": {"groups": GROUPS}},
}
"""Bit-identical with the sequential engine."""
CLOSE = {
    name: {"method": method, "engine": {"name": engine, "device": "cpu"}, "ensemble": {"members": 4}}
    for name, method, engine in (
        ("stacked", "gncl", "stacked"),
        ("threaded", "gncl", "threaded"),
        ("threaded, separable", "bagging", "threaded"),
    )
}
AUTO = {"auto": {"method": "gncl", "engine": {"name": "auto", "device": "cpu"}}}
SPECS = {name: small_spec(training=training(epochs=1), **case) for name, case in (EXACT | CLOSE | AUTO).items()}


def train(spec: dict, path: Path, progress: bool | CrashAfter = False) -> ek.Run:
    return ek.train(spec, path, progress=progress, plugins=PLUGINS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every spec trained on two ranks, which meet once for all of them; and measurements of engines by each rank."""
    folder = tmp_path_factory.mktemp("ranks")

    def work() -> None:
        with joined_ranks() as group:
            for name, spec in SPECS.items():
                train(spec, folder / "two" / name)
            # each rank measures something else
            measured = {"sequential": 1.0 + 8 * group.rank, "threaded": 9.0 - 8 * group.rank, "stacked": 5.0}
            if group.is_first:
                measured["compiled"] = 0.5
            row = {"seconds": measured, "contenders": list(measured), "reliable_ratio": 1.05}
            selection._measure_here = lambda work, order: row
            choice = selection.choose_engine(work_of(group))
            (folder / f"measured-{group.rank}.json").write_text(json.dumps([choice.engine, choice.seconds_per_step]))

    run_on_ranks(work, 2)
    return folder


def work_of(group) -> Work:
    """Work that nobody does, on these ranks."""
    settings = selection.EngineSettings(torch.device("cpu"), None, group=group)
    return Work([], SimpleNamespace(), settings, SimpleNamespace(), None)


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_give_the_bits_of_one_process(name, folder):
    train(SPECS[name], folder / "one" / name)
    assert_same_run(folder / "one" / name, folder / "two" / name)


@pytest.mark.parametrize("name", CLOSE)
def test_other_engines_agree_within_rounding(name, folder):
    train(SPECS[name] | {"engine": SEQUENTIAL}, folder / "one" / name)
    one, two = (load_file(folder / where / name / "model.safetensors") for where in ("one", "two"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-5, atol=1e-5)


def test_networks_of_different_cost_are_shared_out(folder):
    ranks = ek.open_run(folder / "two" / "different models").environment["ranks"]
    assert len(ranks) == 3
    assert set(ranks) == {0, 1}


def test_auto_decides_once_for_all_ranks_by_the_slowest(folder):
    first, second = (json.loads((folder / f"measured-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second == ["stacked", {"sequential": 9.0, "threaded": 9.0, "stacked": 5.0}]
    run = ek.open_run(folder / "two" / "auto")
    assert run.environment["engine"] == run.spec.engine.name != "auto"


def test_a_run_is_resumed_with_another_number_of_ranks_bit_for_bit(tmp_path):
    spec = small_spec(method="gncl", ensemble={"members": 2}, training=training(epochs=2))
    train(spec, tmp_path / "whole")
    often = spec | {"training": spec["training"] | {"checkpoint_every_minutes": 1e-9}}
    with pytest.raises(Crash):
        train(often, tmp_path / "run", CrashAfter(1, 2))
    run_on_ranks(lambda: ek.resume(tmp_path / "run", progress=False), 3)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    run_on_ranks(lambda: train(spec | {"training": training(epochs=1)}, tmp_path / "longer"), 2)
    ek.resume(tmp_path / "longer", epochs=2, progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "longer")
