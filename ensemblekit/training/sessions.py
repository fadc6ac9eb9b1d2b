"""Trains a run in its directory, new or resumed: signals, the lock and what changes when a run goes on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.registry import Registry
from ensemblekit.data.loading import Data
from ensemblekit.engines.selection import preferred_engine
from ensemblekit.engines.together import SharedStack
from ensemblekit.members.python_specs import with_data
from ensemblekit.ranks.group import ALONE, Group
from ensemblekit.ranks.session import joined_ranks, watch_run
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.following import FollowedDirectory
from ensemblekit.runs.in_memory import InMemoryRun
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.run import read_spec
from ensemblekit.spec import reader
from ensemblekit.spec.sections import Spec
from ensemblekit.training.cooperation import run_begun_before
from ensemblekit.training.environment import environment
from ensemblekit.training.interruption import StopRequest, stop_requests
from ensemblekit.training.only_run import only_run_of_process
from ensemblekit.training.resuming import check_can_go_on, check_was_trained, finished_text
from ensemblekit.training.trainer import Steps, Trainer, finish

RUN = "run"
"""The name by which ranks agree on the run directory."""


def train_new(
    spec: Spec,
    registry: Registry,
    out: str | Path | None = None,
    listeners: Iterable[object] = (),
    data: Data | None = None,
    name: str = "run",
) -> RunDirectory:
    """Train a spec with the plugins of a registry in a new run directory; see `ensemblekit.api.train`."""
    with joined_ranks() as group:
        if begun := group.agree(RUN, run_begun_before(out, name) if group.is_first else None):
            # torchrun has started all processes again, or this one alone
            return train_on(begun, registry, listeners, loaded=data)
        with only_run_of_process(), stop_requests() as stop, _claimed(out, name, group) as directory:
            watch_run(directory.path, spec.engine.rank_timeout)
            Trainer(spec, directory, data, _first_only(listeners, group), stop=stop, group=group).train(registry)
        group.first(None)  # everything is written
    return RunDirectory.open(directory.path)


@contextmanager
def _claimed(out: str | Path | None, name: str, group: Group) -> Iterator[RunDirectory]:
    """Claim a directory for a new run; ranks other than the first follow."""
    if not group.is_first:
        yield FollowedDirectory(Path(group.agree(RUN, None)))
        return
    with RunDirectory.claim(out) if out else RunDirectory.claim_next(name) as directory:
        group.agree(RUN, str(directory.path.absolute()))
        yield directory


def _first_only(listeners: Iterable[object], group: Group) -> list[object]:
    """Return whoever follows a run: only the first rank shows anything."""
    return list(listeners) if group.is_first else []


def train_in_memory(spec: Spec, registry: Registry, data: Data, listeners: Iterable[object] = ()) -> InMemoryRun:
    """Train a spec without a run directory and without test data; the bits depend on the arguments alone.

    No engine is measured: "auto" is the preferred one that supports the members. Signals are left to the caller, and a
    run that another thread trains is awaited.
    """
    run = InMemoryRun()
    with only_run_of_process(wait=True):
        trainer = Trainer(spec, run, data, listeners)
        trainer.evaluator.leave_out("test")
        if trainer.engine.name == "auto":
            trainer.engine.name = preferred_engine(trainer.members.networks, trainer.settings)
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
    loaded: Data | None = None,
) -> RunDirectory:
    """Continue a run with the plugins of a registry; see `ensemblekit.api.resume`. `loaded` data is used as it is."""
    with joined_ranks() as group:
        directory = RunDirectory.open(path) if group.is_first else FollowedDirectory.open(path)
        changes = {"engine": engine, "device": device, "epochs": epochs}
        with only_run_of_process(), stop_requests() as stop, directory.lock():
            finish(_steps_on(directory, registry, _first_only(listeners, group), (data, loaded), changes, stop, group))
        group.first(None)  # everything is written
    return RunDirectory.open(path)


def steps_of(
    spec: Spec,
    path: Path,
    resume: bool,
    registry: Registry,
    listeners: Sequence[object],
    data: Data,
    stop: StopRequest,
    shared: SharedStack,
) -> Steps:
    """Train a run that shares a stack with others, new or resumed, and yield before each step.

    Args:
        spec: what to train.
        path: the run directory.
        resume: whether there is a run to continue.
        registry: its plugins.
        listeners: objects that follow it.
        data: the data, which all runs share.
        stop: asks all runs to stop.
        shared: the stack.
    """
    if resume:
        directory = RunDirectory.open(path)
        with directory.lock():
            changes = {"engine": None, "device": None, "epochs": None}
            yield from _steps_on(directory, registry, listeners, (None, data), changes, stop, ALONE, shared)
    else:
        with RunDirectory.claim(path) as directory:
            trainer = Trainer(spec, directory, data, listeners, stop=stop, shared=shared)
            yield from trainer.training_steps(registry)


def _steps_on(
    directory: RunDirectory,
    registry: Registry,
    listeners: Sequence[object],
    data: tuple[Any, Data | None],
    asked: Mapping[str, Any],
    stop: StopRequest,
    group: Group,
    shared: SharedStack | None = None,
) -> Steps:
    path, epochs = directory.path, asked["epochs"]
    stop.outcome = ("nothing was changed", str(path), f"continue with: ensemblekit resume {path}")
    directory.restore_spec()
    if not directory.has_environment:
        recorded = reader.load_spec(directory.path / "spec.toml", None, registry, in_memory=True)
        directory.restore_environment(environment(recorded, registry))
    group.first(None)  # what was lost is there again, before others read it
    check_was_trained(directory, asked)
    spec = read_spec(directory, registry, for_training=True)
    watch_run(path, spec.engine.rank_timeout)
    longer = spec if epochs is None else _lengthened(directory, spec, epochs, registry)
    is_longer = longer.training.epochs != spec.training.epochs
    # a rank that was started again has to follow the others to the end, even if everything is written
    if group.rejoins is None and not is_longer and not group.first(directory.needs_training()):
        _tell_finished(directory, listeners)
        return
    overrides = {"engine.name": asked["engine"], "engine.device": asked["device"], "training.epochs": epochs}
    changes = {key: value for key, value in overrides.items() if value}
    given, loaded = data
    changed, prepared = with_data(_changed(directory, changes, spec, registry), given)
    trainer = Trainer(changed, directory, loaded or prepared, listeners, stop=stop, group=group, shared=shared)
    trainer.check_same_data()
    if is_longer:
        trainer.check_restorable()
        # only now, when all that the longer run needs is there: it takes the place of what has finished
        directory.lengthen(longer.to_toml(), (directory.newest_position or Position(0)).epoch)
    yield from trainer.resumed_steps()


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
    # data may have been passed in Python; if so and if it is missing now, loading it says so
    file = directory.path / "spec.toml"
    return reader.load_spec(file, overrides, registry, in_memory=True) if overrides else spec
