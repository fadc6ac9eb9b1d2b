"""Which runs of a sweep are trained together, in one stack, and training them so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ensemblekit.analysis.grids import PlannedRun
from ensemblekit.analysis.sweep_events import RunEvents
from ensemblekit.analysis.sweep_queue import Outcome
from ensemblekit.core.errors import EnsemblekitError, Interrupted, explain, one_line
from ensemblekit.core.hooks import RunHooks
from ensemblekit.data.loading import Data
from ensemblekit.engines.stacked import StackedEngine
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.sections import Spec
from ensemblekit.training.together import RunToTrain, reason_alone, runs_per_stack

if TYPE_CHECKING:
    from ensemblekit.analysis.sweep_runner import SweepRunner

NO_OTHER = "no other run differs from it only in the method's parameters or the seed"
FULL = "the stack of the other runs is full"


@dataclass(frozen=True)
class Division:
    """The runs of a sweep that are trained together, and those that are not."""

    stacks: list[list[PlannedRun]]
    alone: list[PlannedRun]
    reasons: Mapping[str, str]
    """Why runs are trained alone, by their names."""

    def lines(self) -> list[str]:
        """Say in words which runs are together, and which are not and why."""
        together = [f"{len(runs)} runs are trained together: {_listed(runs)}" for runs in self.stacks]
        by_reason: dict[str, list[PlannedRun]] = {}
        for run in self.alone:
            by_reason.setdefault(self.reasons[run.name], []).append(run)
        return together + [f"trained alone: {_listed(runs)}: {reason}" for reason, runs in by_reason.items()]


def _listed(runs: Sequence[PlannedRun]) -> str:
    names = [run.name for run in runs]
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} … {names[-1]}"


def divide(
    runs: Sequence[PlannedRun],
    specs: Mapping[str, Spec],
    load: Callable[[Spec], Data],
    begun_with: Callable[[PlannedRun], str | None] = lambda run: None,
) -> Division:
    """Divide runs into those that can be trained together.

    Args:
        runs: the runs.
        specs: their specs by name.
        load: loads the data of a spec.
        begun_with: returns the engine of a run that was begun before.
    """
    stacks: list[list[PlannedRun]] = []
    reasons: dict[str, str] = {}
    similar: dict[str, list[PlannedRun]] = {}
    for run in runs:
        engine, reason = begun_with(run), reason_alone(specs[run.name])
        if engine not in (None, StackedEngine.name):
            reason = f'it was begun with the engine "{engine}"'
        if reason:
            reasons[run.name] = reason
        else:
            similar.setdefault(_common_part(specs[run.name]), []).append(run)
    for group in similar.values():
        number, reason = _runs_per_stack(specs[group[0].name], load) if len(group) > 1 else (1, NO_OTHER)
        if number == 1:
            reasons |= {run.name: reason for run in group}
            continue
        count = -(-len(group) // number)
        bounds = [index * len(group) // count for index in range(count + 1)]
        parts = [group[start:end] for start, end in pairwise(bounds)]
        stacks += [part for part in parts if len(part) > 1]
        reasons |= {part[0].name: FULL for part in parts if len(part) == 1}
    return Division(stacks, [run for run in runs if run.name in reasons], reasons)


def _common_part(spec: Spec) -> str:
    """Return a text that is equal for runs that differ only in the parameters of methods and in the seed."""
    tables = spec.to_dict() | {"seed": None, "method": [method.name for method in spec.methods]}
    split_seed = spec.seed if spec.data.split_seed is None else spec.data.split_seed
    passes = RunHooks(spec.methods).passes(spec.ensemble.members)
    return json.dumps([tables, split_seed, passes], sort_keys=True, default=str)


def _runs_per_stack(spec: Spec, load: Callable[[Spec], Data]) -> tuple[int, str]:
    try:
        return runs_per_stack(spec, load(spec))
    except Exception as error:  # the same happens to each run, which then reports it
        known = error if isinstance(error, EnsemblekitError) else explain(error)
        return 1, one_line(known.line)


def run_together(runner: SweepRunner, pending: Sequence[PlannedRun]) -> None:
    """Train the runs that are left of a sweep, as many as possible together, and the others one after the other.

    Raises:
        Interrupted: every run in work is saved.
    """
    specs = runner.plan.specs
    division = divide(pending, specs, runner.data.load, lambda run: engine_of(runner.directory.run_path(run.name)))
    for text in division.lines():
        runner.listener.notice(text)
    for stack in division.stacks:
        _run_stack(runner, stack)
    for run in division.alone:
        runner.finish(run, runner.run_here(run))


def engine_of(path: Path) -> str | None:
    """Return the engine that a run was begun with; None if it was not begun or cannot be read."""
    try:
        engine = RunDirectory.open(path).environment.get("engine")
    except (EnsemblekitError, OSError):
        return None
    return engine if isinstance(engine, str) else None


def _run_stack(runner: SweepRunner, stack: Sequence[PlannedRun]) -> None:
    planned = {run.name: run for run in stack}
    to_train = []
    for run in stack:
        runner.listener.run_started(run.name)
        path, events = runner.directory.run_path(run.name), RunEvents(run.name, runner.listener)
        try:
            resume = runner.prepare(run)
        except (EnsemblekitError, OSError) as error:
            runner.finish(run, runner.failure(run, error))
        else:
            to_train.append(RunToTrain(run.name, runner.plan.specs[run.name], path, resume, [events]))

    def ended(trained: RunToTrain, error: BaseException | None) -> None:
        run = planned[trained.name]
        runner.finish(run, Outcome("finished") if error is None else runner.failure(run, error))

    try:
        runner.training.train_together(to_train, runner.data.load(runner.plan.specs[stack[0].name]), ended)
    except (Interrupted, KeyboardInterrupt):
        for run in stack:
            runner.update(run)
        raise
