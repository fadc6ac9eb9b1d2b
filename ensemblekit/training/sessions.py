"""Trains a run in its directory, new or resumed: signals, the lock and what changes when a run goes on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.registry import Registry
from ensemblekit.data.loading import Data
from ensemblekit.engines.selection import preferred_engine
from ensemblekit.members.python_specs import with_data
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.in_memory import InMemoryRun
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.run import read_spec
from ensemblekit.spec import reader
from ensemblekit.spec.sections import Spec
from ensemblekit.training.environment import environment
from ensemblekit.training.interruption import stop_requests
from ensemblekit.training.only_run import only_run_of_process
from ensemblekit.training.resuming import check_can_go_on, check_was_trained, finished_text
from ensemblekit.training.trainer import Trainer


def train_new(
    spec: Spec,
    registry: Registry,
    out: str | Path | None = None,
    listeners: Iterable[object] = (),
    data: Data | None = None,
    name: str = "run",
) -> RunDirectory:
    """Train a spec with the plugins of a registry in a new run directory; see `ensemblekit.api.train`."""
    with only_run_of_process(), stop_requests() as stop:
        claim = RunDirectory.claim(out) if out else RunDirectory.claim_next(name)
        with claim as directory:
            Trainer(spec, directory, data, listeners, stop=stop).train(registry)
    return directory


def train_in_memory(spec: Spec, registry: Registry, data: Data, listeners: Iterable[object] = ()) -> InMemoryRun:
    """Train a spec without a run directory and without test data; the bits depend on the arguments alone.

    No engine is measured: "auto" is the preferred one that supports the members. Signals are left to the caller, and a
    run that another thread trains is awaited.
    """
    run = InMemoryRun()
    with only_run_of_process(wait=True):
        trainer = Trainer(spec, run, data, listeners)
        trainer.evaluator.leave_out("test")
        if trainer.engine_name == "auto":
            trainer.engine_name = preferred_engine(trainer.members.networks, trainer.settings)
        trainer.train(registry)
    return run


def train_on(
    path: str | Path,
    registry: Registry,
    listeners: Iterable[object] = (),
    data: Any = None,
    engine: str | None = None,
    device: str | None = None,
    epochs: int | None = None,
) -> RunDirectory:
    """Continue a run with the plugins of a registry; see `ensemblekit.api.resume`."""
    directory = RunDirectory.open(path)
    listeners = list(listeners)
    with only_run_of_process(), stop_requests() as stop, directory.lock():
        stop.outcome = ("nothing was changed", str(path), f"continue with: ensemblekit resume {path}")
        directory.restore_spec()
        if not directory.has_environment:
            recorded = reader.load_spec(directory.path / "spec.toml", None, registry)
            directory.restore_environment(environment(recorded, registry))
        check_was_trained(directory, {"engine": engine, "device": device, "epochs": epochs})
        spec = read_spec(directory, registry, for_training=True)
        longer = spec if epochs is None else _lengthened(directory, spec, epochs, registry)
        if longer.training.epochs == spec.training.epochs and not directory.needs_training():
            _tell_finished(directory, listeners)
            return directory
        overrides = {"engine.name": engine, "engine.device": device, "training.epochs": epochs}
        changes = {key: value for key, value in overrides.items() if value}
        changed, loaded = with_data(_changed(directory, changes, spec, registry), data)
        trainer = Trainer(changed, directory, loaded, listeners, stop=stop)
        trainer.check_same_data()
        if longer.training.epochs != spec.training.epochs:
            # only now, when all that the longer run needs is there: it takes the place of what has finished
            directory.lengthen(longer.to_toml(), (directory.newest_position or Position(0)).epoch)
        trainer.resume()
    return directory


def _tell_finished(directory: RunDirectory, listeners: Sequence[object]) -> None:
    """Say that a run has finished, and what of it was found damaged or lost, which is recorded too."""
    if directory.damage:
        directory.write_status("finished", notices=[*directory.notices, *directory.damage])
    for text in (*directory.damage, finished_text(directory.path, len(directory.read_metrics()))):
        RunHooks([], listeners).call.notice(text=text)


def _lengthened(directory: RunDirectory, spec: Spec, epochs: int, registry: Registry) -> Spec:
    """Return the spec of a run with another number of epochs, if its methods can go on with it."""
    longer = _changed(directory, {"training.epochs": epochs}, spec, registry)
    check_can_go_on(spec, longer, directory.newest_position or Position(0))
    return longer


def _changed(directory: RunDirectory, overrides: Mapping[str, Any], spec: Spec, registry: Registry) -> Spec:
    return reader.load_spec(directory.path / "spec.toml", overrides, registry) if overrides else spec
