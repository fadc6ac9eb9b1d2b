"""The smallest runs there are: a few samples and a small network, to see a plugin at work in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from math import prod
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ensemblekit.core.losses import MSE, CrossEntropy
from ensemblekit.core.plugin import DataInfo, Dataset, Model, Plugin, Splits
from ensemblekit.core.registry import PluginInfo, Registry
from ensemblekit.core.seeds import generator
from ensemblekit.display.progress import Progress
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import Spec

BATCH_SIZE = 9
NUM_TRAIN, NUM_TEST = 20, 8
NUM_CLASSES, NUM_VALUES = 8, 2
"""More classes than members: there are methods that work with no fewer."""


class TinyData(Dataset):
    """Random inputs whose class, or whose values, can be learned."""

    shape: tuple[int, ...] = Field((6,), description="shape of an input")
    regression: bool = Field(False, description="predict real values instead of a class")

    @property
    def info(self) -> DataInfo:
        if self.regression:
            return DataInfo("regression", self.shape, NUM_VALUES)
        return DataInfo("classification", self.shape, NUM_CLASSES)

    def load(self, seed: int) -> Splits:
        size = NUM_TRAIN + NUM_TEST
        inputs = torch.randn(size, *self.shape, generator=generator(seed, "inputs"))
        outputs = NUM_VALUES if self.regression else NUM_CLASSES
        weights = torch.randn(prod(self.shape), outputs, generator=generator(0, "weights"))
        targets = inputs.flatten(1) @ weights
        targets = targets if self.regression else targets.argmax(dim=1)
        return Splits((inputs[:NUM_TRAIN], targets[:NUM_TRAIN]), (inputs[NUM_TRAIN:], targets[NUM_TRAIN:]), self.info)


class TinyNetwork(Model):
    """One small hidden layer."""

    dropout: float = Field(0.0, ge=0, lt=1, description="share of it that is dropped in training")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        hidden = (nn.Linear(prod(input_shape), 8), nn.Tanh(), nn.Dropout(self.dropout))
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, num_outputs))


def registry_with(*plugins: Plugin) -> Registry:
    """The given plugins by their names, and what a tiny run needs besides."""
    found = {(plugin.kind, plugin.name): type(plugin) for plugin in plugins}
    for plugin in (TinyData(), TinyNetwork(), CrossEntropy(), MSE()):
        found.setdefault((plugin.kind, plugin.name), type(plugin))
    return Registry(
        PluginInfo(kind, name, f"{cls.__module__}:{cls.__qualname__}", "the contract kit", "", local_class=cls)
        for (kind, name), cls in found.items()
    )


def tiny_spec(registry: Registry, changes: Mapping[str, Any] | None = None) -> Spec:
    """The spec of a tiny run; `changes` are of whole dotted paths."""
    tables = {
        "data": {"name": TinyData().name},
        "model": {"name": TinyNetwork().name},
        "training": {"epochs": 4, "batch_size": BATCH_SIZE, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return load_spec(tables, changes, registry)


@contextmanager
def empty_directory() -> Iterator[Path]:
    """A temporary directory that is also the working directory, so that what is written by habit is gone afterwards."""
    with TemporaryDirectory(prefix="ensemblekit-") as folder, chdir(folder):
        yield Path(folder)


class CopyAfter(Progress):
    """Copies the run directory when an epoch is saved: what a run that is killed then leaves behind."""

    def __init__(self, epoch: int, run: Path, copy: Path) -> None:
        self.epoch, self.run, self.copy = epoch, run, copy

    def saved(self, epoch: int) -> None:
        if epoch == self.epoch:
            copytree(self.run, self.copy)


def trained_tensors(run: Path) -> dict[str, Tensor]:
    """Every weight that a run has left."""
    return RunDirectory.open(run).read_model()[0]
