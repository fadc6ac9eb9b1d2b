"""Every installed plugin passes its contract, found through the same entry points as any other plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from ensemblekit_models.mlp import MLP
from ensemblekit_models.resnet import ResNet
from helpers.broken_others import GoodData
from helpers.tracked_runs import page_of
from PIL import Image

import ensemblekit as ek
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.registry import discover
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.testing import run_contract
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.dataset import DatasetContract

OTHER_PARAMETERS = {
    "gncl": [{"lambda": 0}, {"mode": "exact"}],
    "adversarial": [{"epsilon": 0.1}],
    "dropout": [{"passes": 1}],
    "bagging": [{"weights": "bootstrap"}, {"weights": "subsample"}],
    "wagging": [{"weights": "gaussian"}],
    "smcl": [{"k": 2, "combine": "max"}],
    "boosting": [{"schedule": "stagewise", "shrinkage": 0.5}],
    "adaboost": [{"variant": "samme.r", "shrinkage": 0.5}],
    "swa": [{"start": 0.0, "every": 2}],
    "stacking": [{"form": "linear"}],
    "diversity_cooperation": [{"penalty": "kl"}, {"penalty": "cross_entropy"}],
    # the default is the paper's, with up to 90 epochs
    "snapshot": [{"at_epochs": [2, 3]}, {"cycles": 2}],
    "soft_boosting": [{"shrinkage": 0.3}],
    "fast_geometric": [{"cycles": 2}, {"cycles": 1, "cycle": 4}],
    "step": [{"every": 2}],
    "multistep": [{"after": [3, 7]}],
    "cosine": [{"final": 0.1, "warmup_epochs": 1.5}],
    "mlp": [{"dropout": 0.5}, {"hidden": []}],
    "resnet": [{"width": 4, "blocks": 2, "dropout": 0.5}],
    "mobilenet_v3_tiny": [{"dropout": 0.5}],
    "binary_resnet": [{"width": 4, "blocks": 2, "stochastic": False}],
    # the default has eleven million weights; this one has few layers
    "torchvision": [{"arch": "squeezenet1_1"}],
    "sklearn": [{"estimator": "gaussian_nb"}],
    "tabm": [{"hidden": [8], "adapters": "first", "dropout": 0.0}],
    "batch_ensemble_resnet": [{"width": 4, "blocks": 2, "dropout": 0.5}],
    "packed_resnet": [{"width": 4, "blocks": 2, "gamma": 2, "dropout": 0.5}],
    "multi_head": [{"model": MLP(hidden=(8,))}, {"model": ResNet(width=4, blocks=2), "softmax": True}],
}
INSTEAD_OF_DEFAULTS = {"step", "multistep", "snapshot", "torchvision", "multi_head"}
NEED_FILES = {"given", "huggingface", "image_folder", "table", "frozen", "predictions"}
WHOLE_CONTRACT = {check.name for check in DatasetContract(GoodData()).select(PluginContract, DatasetContract)}
"""The checks of a data set whose files are present."""


def plugins() -> Iterator[Plugin]:
    registry = discover()
    for kind in KINDS:
        for name, info in registry.plugins(kind).items():
            if name in NEED_FILES:
                continue
            tables = ([] if name in INSTEAD_OF_DEFAULTS else [{}]) + OTHER_PARAMETERS.get(name, [])
            for table in tables:
                has_plugins = any(isinstance(value, Plugin) for value in table.values())
                plugin = info.load()(**table) if has_plugins else info.load().from_table(table)
                yield plugin.named(name)


def label(plugin: Plugin) -> str:
    return "-".join([plugin.name, *(str(getattr(plugin, key)) for key in sorted(plugin.model_fields_set))])


def assert_passes(plugin: Plugin) -> set[str]:
    """Run the whole contract; returns the names of its checks."""
    results = run_contract(plugin)
    assert [f"{result.name}\n{result.message}" for result in results if not result.passed] == []
    return {result.name for result in results}


@pytest.fixture(autouse=True)
def a_machine_without_data(tmp_path, monkeypatch):
    """Downloaded files of this machine are not found, so that the same checks run everywhere."""
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path / "data"))


@pytest.fixture(autouse=True)
def stand_in_for_tensorboard(monkeypatch):
    """TensorBoard is optional: these tests run without it."""

    class Writer:
        def __init__(self, log_dir: str) -> None:
            Path(log_dir).mkdir(parents=True, exist_ok=True)

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert isinstance(scalar_value, int | float)

        def flush(self) -> None:
            pass

        close = flush

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


@pytest.fixture(autouse=True)
def stand_ins_for_trackers(monkeypatch):
    """Trackers are optional: these tests run without them, and without the seconds that imports and reports take."""
    run = {"step": 0, "id": "abc"}
    monkeypatch.setitem(sys.modules, "wandb", MagicMock(**{f"init.return_value.{key}": run[key] for key in run}))
    for name in ("mlflow", "mlflow.entities", "mlflow.exceptions"):
        monkeypatch.setitem(sys.modules, name, MagicMock(**{"get_tracking_uri.return_value": "http://localhost"}))
    monkeypatch.setattr(ek, "report", page_of, raising=False)


@pytest.mark.contract
@pytest.mark.parametrize("plugin", list(plugins()), ids=label)
def test_every_installed_plugin_passes_its_contract(plugin, monkeypatch):
    if isinstance(plugin, ek.Dataset):
        monkeypatch.setattr(type(plugin), "found_at", lambda dataset: None)
    names = assert_passes(plugin)
    common = {check.name for check in PluginContract(plugin).checks()}
    assert names > common


def test_no_kind_of_plugin_is_left_out():
    assert {plugin.kind for plugin in plugins()} == {kind.name for kind in KINDS.values() if not kind.built_in}
    assert {plugin.name for plugin in plugins()} | NEED_FILES == {info.name for info in discover()}


@pytest.mark.contract
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_csv_table_passes_the_whole_contract(task, tmp_path):
    rows = [f"{i},{i * i % 7},{'ab'[i % 2] if task == 'classification' else i / 3}" for i in range(30)]
    (tmp_path / "table.csv").write_text("\n".join(["first,second,y", *rows]) + "\n")
    table = {"path": str(tmp_path / "table.csv"), "target": "y", "task": task}
    assert assert_passes(ek.datasets()["table"].load().from_table(table).named("table")) == WHOLE_CONTRACT


@pytest.mark.contract
@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_a_folder_of_images_passes_the_whole_contract(storage, tmp_path):
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    table = {"path": str(tmp_path / "images"), "storage": storage, "augment": ["flip"]}
    assert assert_passes(ek.datasets()["image_folder"].load().from_table(table).named("image_folder")) == WHOLE_CONTRACT


@pytest.mark.contract
def test_in_memory_data_passes_the_whole_contract():
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 5, generator=random), torch.arange(40) % 3
    assert assert_passes(InMemoryData().of((inputs[:30], targets[:30]), (inputs[30:], targets[30:]))) == WHOLE_CONTRACT
