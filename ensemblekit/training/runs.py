"""Runs: training one, taking one up again, and loading what it left."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ensemblekit.core.description import spec_overview
from ensemblekit.core.errors import PluginError, RunError, SpecError, UsageError
from ensemblekit.core.metrics import evaluate, flat_metrics
from ensemblekit.core.plugin import DataInfo, Plugin
from ensemblekit.core.registry import Registry
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.display.progress import Progress
from ensemblekit.engines.base import Slot
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.build import build_member
from ensemblekit.members.growing import load_network
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import Spec
from ensemblekit.training.interruption import stop_requests
from ensemblekit.training.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    spec: Spec
    metrics: dict[str, float]
    """The final metrics on the test data: `test_accuracy`, `test_diversity`, `mean_member_accuracy` …"""
    history: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    members: list[dict[str, Any]]
    """Each member by itself on the test data."""
    seconds: dict[str, float]
    """What the time was spent on: `start`, `training`, `evaluation` and `checkpoints`; since the last resume."""
    registry: Registry

    @cached_property
    def ensemble(self) -> Ensemble:
        """The trained ensemble."""
        return load_ensemble(self.path, self.registry)


def free_directory(stem: str) -> Path:
    """A directory under runs/ that does not exist yet: `stem` and the first free number."""
    return next(path for number in count(1) if not (path := Path("runs", f"{stem}-{number}")).exists())


def train_run(spec: Spec, out: Path, data: Data | None, progress: Progress, registry: Registry) -> Run:
    """Train a spec from the beginning into a new directory."""
    started = time.perf_counter()
    RunDirectory.refuse_if_used(out)
    device = choose_device(spec.engine.device)
    data = data or load_data(spec.data, spec.seed)
    trainer = Trainer(spec, data, device, progress)
    try:
        progress.planned([*_plan(trainer), ("out", str(out))])
        engine, measured = trainer.choose_engine()
        progress.engine_chosen(engine, measured)
        resolved = replace(spec, engine=spec.engine.model_copy(update={"name": engine, "device": str(device)}))
        chosen = {"device": str(device), "engine": engine, "engines_measured": measured}
        environment = {**_environment(spec, registry), **chosen}
        directory = RunDirectory.create(out, resolved.to_toml(), environment)
        trainer.seconds["start"] = time.perf_counter() - started
        with directory.lock():
            return _train(trainer, directory, 0, resolved, registry)
    finally:
        trainer.close()


def resume_run(path: Path, data: Data | None, progress: Progress, registry: Registry) -> Run:
    """Go on from the last checkpoint to the end; a run that is finished is returned as it is."""
    started = time.perf_counter()
    directory = RunDirectory.open(path)
    directory.check_spec_unchanged()
    spec = run_spec(directory, registry)
    with directory.lock():
        if (result := directory.read_result()) is not None:
            with _as_written(path / "result.json"):
                metrics, members = result["metrics"], result["members"]
            seconds = directory.environment.get("seconds", {})
            return Run(path, spec, metrics, directory.read_metrics(), members, seconds, registry)
        checkpoint = directory.load_checkpoint()
        trainer = Trainer(spec, data or load_data(spec.data, spec.seed), choose_device(spec.engine.device), progress)
        try:
            trainer.restore(checkpoint)
            directory.truncate_metrics(checkpoint.epoch)
            trainer.history = directory.read_metrics()
            resumed = f"resumed from epoch {checkpoint.epoch}"
            progress.planned([*_plan(trainer), ("out", str(path)), ("resume", resumed)])
            trainer.choose_engine()
            trainer.seconds["start"] = time.perf_counter() - started
            return _train(trainer, directory, checkpoint.epoch, spec, registry)
        finally:
            trainer.close()


def _train(trainer: Trainer, directory: RunDirectory, start_epoch: int, spec: Spec, registry: Registry) -> Run:
    with stop_requests() as stop:
        trainer.train(directory, start_epoch, stop)
        metrics, members = trainer.test()
    networks = {
        f"members.{place}.{name}": value.detach()
        for place, slot in enumerate(trainer.members.slots)
        for name, value in slot.network.state_dict().items()
    }
    if trainer.fitted is not None:
        networks["combiner"] = trainer.fitted
    directory.write_model(networks, _model_metadata(trainer))
    directory.update_environment(seconds=trainer.seconds)
    directory.write_result({"metrics": metrics, "members": members, "epochs": len(trainer.history)})
    run = Run(directory.path, spec, metrics, trainer.history, members, trainer.seconds, registry)
    trainer.hooks.run_finished(metrics=metrics)
    trainer.progress.finished(run)
    return run


def load_ensemble(path: Path, registry: Registry) -> Ensemble:
    """The ensemble that a run has trained, ready for predictions; nothing is unpickled."""
    directory = RunDirectory.open(path)
    spec = run_spec(directory, registry)
    tensors, metadata = directory.read_model()
    with _as_written(path / "model.json"):
        info = DataInfo(metadata["task"], tuple(metadata["input_shape"]), metadata["num_outputs"])
        classes = tuple(metadata["classes"]) if metadata["classes"] else None
        transform = ImageTransform.from_json(metadata["transform"]) if metadata["transform"] else None
        models = [(member, spec.member_models[member]) for member in metadata["members"]]
    num_outputs = spec.loss.num_outputs(info)
    networks = []
    for place, (member, model) in enumerate(models):
        slot = Slot(build_member(model, info.input_shape, num_outputs, spec.seed, member), model, member)
        load_network(slot, tensors, f"members.{place}.")
        networks.append(slot.network)
    return Ensemble(networks, spec, info, classes, transform, tensors.get("combiner")).eval()


def evaluate_run(path: Path, data: Data | None, registry: Registry) -> dict[str, float]:
    """The metrics of a run's ensemble on the test part of its own data, or of other data of the same form."""
    ensemble = load_ensemble(path, registry)
    data = data or load_data(ensemble.spec.data, ensemble.spec.seed)
    if (data.info.input_shape, data.info.num_outputs) != (ensemble.info.input_shape, ensemble.info.num_outputs):
        what = f"data of {data.info.form} do not fit the run's {ensemble.info.form}"
        raise UsageError(what, str(path), "give data of the same form")
    with torch.no_grad():
        batches = data.test.batches(ensemble.spec.training.batch_size)
        outputs = torch.cat([ensemble.member_outputs(batch.inputs) for batch in batches], dim=1)
    return flat_metrics(evaluate(outputs, data.test.targets, ensemble.loss, ensemble.combine(outputs)))


@contextmanager
def _as_written(file: Path) -> Iterator[None]:
    """`RunError` if what was read from a file has not the form in which runs write it."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        what = f"damaged: not of the form that runs write ({type(error).__name__}: {error})"
        raise RunError(what, str(file), "restore the file") from error


def run_spec(directory: RunDirectory, registry: Registry) -> Spec:
    """The spec of a run; a plugin that is not there is named with the package that it came from."""
    with _as_written(directory.path / "environment.json"):
        used = [(entry["kind"], entry["name"], entry["package"]) for entry in directory.environment.get("plugins", [])]
    for kind, name, package in used:
        registry.get(kind, name, package=package)
    try:
        return load_spec(directory.path / "spec.toml", None, registry)
    except SpecError as error:
        for problem in error.problems:
            if "is not a registered" in problem.what:
                raise PluginError(problem.what, f"{problem.path} of {directory.path}", problem.fix) from error
        raise RunError(error.what, error.where, error.fix) from error


def choose_device(name: str) -> torch.device:
    """The device that a spec asks for, or the best there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, True):
        raise UsageError(f'device "{name}" is not available here', "engine.device", 'use "auto" or "cpu"')
    return device


def _plan(trainer: Trainer) -> list[tuple[str, str]]:
    """What will run, with the sizes that are known once data and members are there."""
    sizes = [sum(parameter.numel() for parameter in slot.network.parameters()) for slot in trainer.members.slots]
    data = trainer.data
    held_out = f", {len(data.validation):,} to choose by" if data.validation is not None else ""
    samples = f"{len(data.train):,} samples to train on{held_out}, {len(data.test):,} to test"
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    overview = spec_overview(trainer.spec)
    after_model = next(place for place, (label, _) in enumerate(overview) if label == "members")
    return [
        overview[0],
        ("samples", samples),
        *overview[1:after_model],
        ("parameters", f"{each} for each member, {sum(sizes):,} in all at the start"),
        *overview[after_model:],
    ]


def _environment(spec: Spec, registry: Registry) -> dict[str, Any]:
    from importlib.metadata import version

    used: list[Plugin] = [spec.data, *spec.member_models, *spec.methods, spec.loss, *spec.extensions]
    infos = {registry.get(plugin.kind, plugin.name) for plugin in used if plugin.name in registry.plugins(plugin.kind)}
    return {
        "ensemblekit": version("ensemblekit"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "seed": spec.seed,
        "plugins": [
            {"kind": info.kind, "name": info.name, "package": info.package, "version": info.version}
            for info in sorted(infos, key=lambda info: (info.kind, info.name))
        ],
    }


def _model_metadata(trainer: Trainer) -> Mapping[str, Any]:
    info, data = trainer.data.info, trainer.data
    return {
        "task": info.task,
        "input_shape": list(info.input_shape),
        "num_outputs": info.num_outputs,
        "classes": list(data.classes) if data.classes else None,
        "members": [slot.member for slot in trainer.members.slots],
        "transform": data.test.transform.to_json() if data.test.transform is not None else None,
    }
