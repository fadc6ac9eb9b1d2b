"""What a step does stays on the device: nothing is read back, nothing is made elsewhere. Shown without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.extending_plugins import CASES, PLUGINS
from helpers.plain_methods import plain_methods
from torch import Tensor

from ensemblekit.members.python_specs import registry_of
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import ENGINES
from ensemblekit.training.statistics import EpochStatistics
from ensemblekit.training.trainer import Trainer

READERS = ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__")
METHODS = [
    *({"name": name} for name in sorted(set(plain_methods()) - {"snapshot", "fast_geometric"})),
    {"name": "gncl", "mode": "exact"},
    {"name": "boosting", "schedule": "stagewise"},
    {"name": "snapshot", "at_epochs": [1]},
    {"name": "fast_geometric", "cycles": 2},
]


def trainer(method: dict, model: dict, device: str, engine: str = "stacked", ensemble=None, **options) -> Trainer:
    spec = load_spec(
        {
            "data": {"name": "digits", "limit_train": 80, "limit_test": 20, "augment": ["crop", "flip", "rotate"]},
            "model": model,
            "ensemble": ensemble or {"members": 2},
            "method": method,
            "training": {"epochs": 4, "batch_size": 32, "clip_norm": 1.0},
            "engine": {"name": engine, **options},
        },
        None,
        registry_of(PLUGINS),
    )
    made = Trainer(spec, RunDirectory(Path("run")), device=torch.device(device))
    made.engine.choose()
    return made


def whole_epoch(made: Trainer) -> EpochStatistics:
    statistics, engine = made._start_epoch(1)
    for _ in made._steps(engine, 1, statistics):
        pass  # it pauses before each step
    return statistics


@pytest.mark.parametrize(
    "model", [{"name": "mlp", "dropout": 0.2}, {"name": "resnet", "width": 4, "blocks": 2, "dropout": 0.2}], ids=str
)
@pytest.mark.parametrize("method", METHODS, ids=lambda table: "-".join(map(str, table.values())))
def test_a_whole_epoch_runs_on_a_device_that_has_no_values(method, model):
    """Data, augmentation, members, objective, optimizer and metrics: a tensor of the CPU among them would fail."""
    sums = whole_epoch(trainer(method, model, "meta")).sums
    assert {str(sums[name].device) for name in ("train_objective", "train_loss", "train_accuracy")} == {"meta"}


@pytest.mark.parametrize("case", sorted(set(CASES) - {"weighted", "averaged"}))
def test_every_extension_point_runs_on_it(case):
    """The two left out read the outputs for the training data in life-cycle hooks, outside of steps."""
    table = {"model": {"name": "mlp"}, "method": [], "ensemble": None} | CASES[case]
    sums = whole_epoch(trainer(table["method"], table["model"], "meta", ensemble=table["ensemble"])).sums
    assert str(sums["train_objective"].device) == "meta"


def test_recomputing_runs_on_it_too():
    made = trainer({"name": "gncl"}, {"name": "mlp"}, "meta", recompute=True)
    assert whole_epoch(made).num_steps == len(made.batch_lengths)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("method", METHODS, ids=lambda table: "-".join(map(str, table.values())))
def test_a_step_reads_no_value_back(engine, method, monkeypatch):
    made = trainer(method, {"name": "mlp", "dropout": 0.2}, "cpu", engine)
    running = made.engine.current()
    batches = list(made.data.train.training_batches(32, 0, 1))
    members = [state.seed_index for state in running.active_members]
    weights = [made._weights(batch, members) for batch in batches]
    statistics = EpochStatistics(made.objective, members)
    read: list[str] = []

    def counting(name: str):
        original = getattr(Tensor, name)

        def count(tensor, *arguments, **options):
            read.append(name)
            return original(tensor, *arguments, **options)

        return count

    for name in READERS:
        monkeypatch.setattr(Tensor, name, counting(name))
    for step, batch in enumerate(batches):
        statistics.add(*running.train_step(batch, weights[step], 0.01, step), batch)
    statistics._sum_pending()
    assert read == []
    assert bool(torch.ones(())), "a reader that is counted"
    assert read == ["__bool__"]
    running.close()
