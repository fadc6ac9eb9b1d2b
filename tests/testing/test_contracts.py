"""Everything that is installed keeps its contract, through the entry that anyone's plugin takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import ensemblekit as ek
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.registry import GROUPS, discover
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.testing import contract

OTHER_PARAMETERS = {
    "gncl": [{"lambda": 0}, {"mode": "exact"}],
    "adversarial": [{"epsilon": 0.1}],
    "dropout": [{"passes": 1}],
    "bagging": [{"weights": "bootstrap"}, {"weights": "subsample"}],
    "wagging": [{"weights": "gaussian"}],
    "smcl": [{"k": 2, "combine": "max"}],
    "boosting": [{"schedule": "stagewise", "shrinkage": 0.5}],
    "stacking": [{"form": "linear"}],
    "diversity_cooperation": [{"penalty": "kl"}, {"penalty": "cross_entropy"}],
    # the paper's own epochs, up to 90, take long
    "snapshot": [{"at_epochs": [2, 3]}, {"cycles": 2}],
    "soft_boosting": [{"shrinkage": 0.3}],
    "fast_geometric": [{"cycles": 2}, {"cycles": 1, "cycle": 4}],
    "mlp": [{"dropout": 0.5}, {"hidden": []}],
    "resnet": [{"width": 4, "blocks": 2, "dropout": 0.5}],
    "mobilenet_v3_tiny": [{"dropout": 0.5}],
    "binary_resnet": [{"width": 4, "blocks": 2, "stochastic": False}],
    # its default has eleven million weights
    "torchvision": [{"arch": "shufflenet_v2_x0_5"}],
}
INSTEAD_OF_DEFAULTS = {"snapshot", "torchvision"}
NEED_FILES = {"given", "image_folder", "table"}


def plugins() -> Iterator[Plugin]:
    registry = discover()
    for kind in GROUPS:
        for name, info in registry.plugins(kind).items():
            if name in NEED_FILES:
                continue
            tables = ([] if name in INSTEAD_OF_DEFAULTS else [{}]) + OTHER_PARAMETERS.get(name, [])
            for table in tables:
                yield info.load().from_table(table).named(name)


def checks() -> list[pytest.param]:
    """Those of a machine without files, whatever this one has: its data sets are asked what they say of that."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        for plugin in plugins():
            if isinstance(plugin, ek.Dataset):
                patched.setattr(type(plugin), "found_at", lambda dataset: None)
            settings = "-".join(str(getattr(plugin, key)) for key in sorted(plugin.model_fields_set))
            for check in contract(plugin):
                label = "-".join(part for part in (plugin.name, settings, check.name) if part)
                found.append(pytest.param(check, id=label))
    return found


@pytest.fixture(autouse=True)
def a_machine_without_data(tmp_path, monkeypatch):
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path / "data"))


@pytest.fixture(autouse=True)
def stand_in_for_tensorboard(monkeypatch):
    """Not everyone who runs these tests has it installed."""

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


@pytest.mark.parametrize("check", checks())
def test_every_installed_plugin_keeps_its_contract(check):
    check()


def test_no_kind_of_plugin_is_left_out():
    kinds = {plugin.kind for plugin in plugins()}
    assert kinds == set(GROUPS)
    assert {plugin.name for plugin in plugins()} | NEED_FILES == {info.name for info in discover()}


def assert_kept(plugin: Plugin) -> None:
    found = contract(plugin)
    assert len(found) == 10
    for check in found:
        check()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_table_of_ones_own_keeps_the_contract(task, tmp_path):
    rows = [f"{i},{i * i % 7},{'ab'[i % 2] if task == 'classification' else i / 3}" for i in range(30)]
    (tmp_path / "own.csv").write_text("\n".join(["first,second,y", *rows]) + "\n")
    table = {"path": str(tmp_path / "own.csv"), "target": "y", "task": task}
    assert_kept(ek.datasets()["table"].load().from_table(table).named("table"))


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_images_of_ones_own_keep_the_contract(storage, tmp_path):
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    table = {"path": str(tmp_path / "images"), "storage": storage, "augment": ["flip"]}
    assert_kept(ek.datasets()["image_folder"].load().from_table(table).named("image_folder"))


def test_data_given_in_python_keeps_the_contract():
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 5, generator=random), torch.arange(40) % 3
    assert_kept(InMemoryData().of((inputs[:30], targets[:30]), (inputs[30:], targets[30:])))
