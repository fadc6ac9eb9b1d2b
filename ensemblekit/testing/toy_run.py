"""The smallest useful runs: a few samples and a small network, to try a plugin in a fraction of a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import replace
from inspect import isabstract
from math import prod
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ensemblekit.api import run_spec
from ensemblekit.core.dataset import DataInfo, Dataset, Splits
from ensemblekit.core.errors import UsageError
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.label_losses import BCE
from ensemblekit.core.losses import MSE, NLL, CrossEntropy, GaussianHinge, Loss
from ensemblekit.core.nesting import PLUGIN, found
from ensemblekit.core.parameters import field_schemas, parameters, plugin_kind
from ensemblekit.core.plugin import Method, Model, Plugin
from ensemblekit.core.registry import PluginInfo, Registry
from ensemblekit.core.seeds import generator
from ensemblekit.data.augmentation import Crop, Flip, Rotate
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import Run
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.schedules import Constant
from ensemblekit.spec.sections import ENGINES, Spec

BATCH_SIZE = 9
NUM_TRAIN, NUM_TEST = 20, 8
NUM_CLASSES, NUM_VALUES = 6, 2
"""More classes than members: there are methods that need it."""
EXTRA_SIZE = 5
"""Size of each output beside a prediction."""


class ToyData(Dataset):
    """Random inputs with targets that a small network can learn."""

    shape: tuple[int, ...] = Field((6,), description="shape of an input")
    regression: bool = Field(False, description="predict real values instead of a class")
    multilabel: bool = Field(False, description="predict several labels instead of a class")
    num_classes: int = Field(NUM_CLASSES, ge=2, description="number of classes")
    num_values: int = Field(NUM_VALUES, ge=1, description="number of real values to predict")

    @property
    def info(self) -> DataInfo:
        if self.regression:
            return DataInfo("regression", self.shape, self.num_values)
        if self.multilabel:
            return DataInfo("multilabel", self.shape, self.num_classes)
        return DataInfo("classification", self.shape, self.num_classes)

    def load(self, seed: int) -> Splits:
        inputs = torch.randn(NUM_TRAIN + NUM_TEST, *self.shape, generator=generator(seed, "inputs"))
        weights = torch.randn(prod(self.shape), self.info.num_outputs, generator=generator(0, "weights"))
        targets = inputs.flatten(1) @ weights
        if self.multilabel:
            targets = (targets > 0).float()
        elif not self.regression:
            targets = targets.argmax(dim=1)
        return Splits((inputs[:NUM_TRAIN], targets[:NUM_TRAIN]), (inputs[NUM_TRAIN:], targets[NUM_TRAIN:]), self.info)


class ToyNetwork(Model):
    """A network with one small hidden layer."""

    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate of the hidden layer")
    probabilities: bool = Field(False, description="end with a softmax")
    extras: tuple[str, ...] = Field((), description="names of outputs beside the prediction")

    def extra_outputs(self, input_shape: tuple[int, ...]) -> Mapping[str, int]:
        return dict.fromkeys(self.extras, EXTRA_SIZE)

    def gives_probabilities(self) -> bool:
        return self.probabilities

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        hidden = (nn.Linear(prod(input_shape), 8), nn.Tanh(), nn.Dropout(self.dropout))
        last = (nn.Softmax(dim=-1),) if self.probabilities else ()
        width = num_outputs + EXTRA_SIZE * len(self.extras)
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, width), *last)


def toy_registry(*plugins: Plugin) -> Registry:
    """A registry of these plugins and those in them by their names, and of everything else that a toy run needs."""
    classes = {(plugin.kind, plugin.name): type(plugin) for outer in plugins for plugin in _with_inner(outer)}
    others = (CrossEntropy(), MSE(), NLL(), BCE(), GaussianHinge(), Constant(), Crop(), Flip(), Rotate())
    for plugin in (ToyData(), ToyNetwork(), *others):
        classes.setdefault((plugin.kind, plugin.name), type(plugin))
    return Registry(_registration(cls, name) for (_, name), cls in classes.items())


def _with_inner(plugin: Plugin) -> Iterator[Plugin]:
    yield plugin
    for _, inner in plugin.inner_plugins():
        yield from _with_inner(inner)
    if isinstance(plugin, Method):
        yield from losses_beside(type(plugin))


def losses_beside(method_class: type[Method]) -> list[Loss]:
    """The losses of a method's own module, as far as they need no parameters: it may be made for one of them."""
    modules = {base.__module__ for base in method_class.__mro__}
    return [
        loss_class()
        for loss_class in _subclasses(Loss)
        if loss_class.__module__ in modules
        and not isabstract(loss_class)
        and not any(parameter.is_required() for parameter in loss_class.model_fields.values())
    ]


def _subclasses(base: type[Loss]) -> Iterator[type[Loss]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _registration(cls: type[Plugin], name: str) -> PluginInfo:
    target = f"{cls.__module__}:{cls.__qualname__}"
    return PluginInfo(cls.kind, name, target, "the contract kit", "", local_class=cls)


def required_plugins(plugin_class: type[Plugin]) -> dict[str, Any]:
    """Values for the required parameters of a plugin that are plugins: the simplest ones of their kinds.

    Returns:
        Plugins, or lists of one, by the name of the parameter.
    """
    required = [parameter.name for parameter in parameters(plugin_class) if parameter.required]
    schemas = {key: field_schemas(plugin_class)[key] for key in required}
    return {key: _simplest(schema) for key, schema in schemas.items() if plugin_kind(schema)}


def _simplest(schema: Mapping[str, Any]) -> Any:
    """The simplest value of a JSON schema that contains plugins."""
    for choice in schema.get("anyOf", [schema]):
        if PLUGIN in choice:
            kind: str = choice[PLUGIN]
            return _SIMPLEST.get(kind, KINDS[kind].base_class)()
        if "prefixItems" in choice:
            return [_simplest(item) for item in choice["prefixItems"]]
        if "items" in choice:
            return [_simplest(choice["items"])] * max(1, choice.get("minItems", 1))
        if isinstance(choice.get("additionalProperties"), dict):
            return {"toy": _simplest(choice["additionalProperties"])}
    return None


_SIMPLEST: dict[str, type[Plugin]] = {"model": ToyNetwork, "dataset": ToyData, "loss": CrossEntropy}
"""For other kinds, the base class itself, whose hooks do nothing."""


def with_toys(registry: Registry, plugins: Mapping[str, Any]) -> Registry:
    """A registry that also has the classes of the values that `required_plugins` returns."""
    toys = {plugin.name: plugin for value in plugins.values() for _, plugin in found(Plugin, value, "")}
    return registry.with_plugins(
        _registration(type(plugin), name) for name, plugin in toys.items() if name not in registry.plugins(plugin.kind)
    )


def toy_spec(registry: Registry, changes: Mapping[str, Any] | None = None) -> Spec:
    """The spec of a toy run.

    Args:
        registry: Where the spec's plugins are looked up.
        changes: Values by dotted path, as on the command line: `{"training.epochs": 1}`.
    """
    tables = {
        "data": {"name": ToyData().name},
        "model": {"name": ToyNetwork().name},
        "training": {"epochs": 1, "batch_size": BATCH_SIZE, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
        "ensemble": {"members": 2},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return load_spec(tables, changes, registry)


@contextmanager
def empty_directory() -> Iterator[Path]:
    """A temporary directory that is the working directory too, so that plugins leave no files behind."""
    with TemporaryDirectory(prefix="ensemblekit-") as folder, chdir(folder):
        yield Path(folder)


def train_toy_run(spec: Spec, registry: Registry) -> Run:
    """Train a spec as `ensemblekit train` does, in a temporary directory that is gone afterwards."""
    with empty_directory() as folder:
        return run_spec(spec, registry, folder / "run")


def train_with_every_engine(spec: Spec, registry: Registry) -> dict[str, Run]:
    """Train a spec with each engine that supports it on this machine.

    Returns:
        The runs by the name of the engine; always one of "sequential", which supports everything.
    """
    runs = {"sequential": train_toy_run(_with_engine(spec, "sequential"), registry)}
    for name in sorted(ENGINES.keys() - runs.keys()):
        try:
            runs[name] = train_toy_run(_with_engine(spec, name), registry)
        except UsageError:  # nothing is wrong with the spec, so this engine cannot run it here
            continue
    return runs


def _with_engine(spec: Spec, name: str) -> Spec:
    return replace(spec, engine=spec.engine.model_copy(update={"name": name}))


class CopyAfterEpoch:
    """Copies the run directory when an epoch is saved: the copy is what a run killed at that moment leaves behind."""

    def __init__(self, epoch: int, copy: Path) -> None:
        self.epoch, self.copy = epoch, copy

    @hookimpl
    def checkpoint_saved(self, epoch: int, step: int, path: Path) -> None:
        if epoch == self.epoch and not step:
            copytree(path, self.copy)


class RaiseFailures:
    """Ends a run with the failure of an observer, without which it would go on."""

    is_essential = True

    def __init__(self) -> None:
        self.handled_outside = sys.exception()
        """What the caller is handling, if anything: not a failure of the run."""

    @hookimpl
    def notice(self) -> None:
        error = sys.exception()
        if error is not None and error is not self.handled_outside:
            raise error


def trained_weights(run: Path) -> dict[str, Tensor]:
    """All tensors of the model that a run has saved."""
    return RunDirectory.open(run).read_model()[0]
