"""Runs a sweep: starts what is planned, resumes what was interrupted, and goes on when a run fails."""

from __future__ import annotations

import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ensemblekit.analysis.grids import PlannedRun
from ensemblekit.analysis.plans import SweepPlan
from ensemblekit.analysis.ray_cluster import RayShare
from ensemblekit.analysis.ray_jobs import run_on_ray
from ensemblekit.analysis.sweep_events import RunEvents, SweepListener
from ensemblekit.analysis.sweep_jobs import run_in_processes
from ensemblekit.analysis.sweep_queue import Outcome, RunQueue
from ensemblekit.analysis.sweep_rows import ENDED_EARLY, SweepRun, is_unstarted
from ensemblekit.analysis.sweeps import Sweep, SweepDirectory, leaves
from ensemblekit.analysis.together import run_together
from ensemblekit.core.errors import EnsemblekitError, Interrupted, RunError, explain, one_line
from ensemblekit.data.loading import Data, load_data
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.sections import Spec
from ensemblekit.training.together import RunToTrain

MACHINE_KEYS = ("engine.name", "engine.device")
"""Keys that a run resolves when it starts."""


class Pruned(Interrupted):
    """A search has stopped a hopeless run; the search goes on."""


class Training(Protocol):
    """Trains single runs; the Python interface provides it."""

    def train(self, spec: Spec, path: Path, listeners: Iterable[object], data: Data | None) -> object:
        """Train a spec in a new run directory."""

    def resume(self, path: Path, listeners: Iterable[object]) -> object:
        """Continue a run."""

    def train_together(
        self, runs: Sequence[RunToTrain], data: Data, ended: Callable[[RunToTrain, BaseException | None], None]
    ) -> None:
        """Train or continue runs in one stack; `ended` is called for each run, with its error if it has failed."""


class SweepRunner:
    """Runs what is left of a sweep.

    Args:
        directory: the sweep's directory, locked, with its plan written.
        plan: its runs.
        training: trains single runs.
        listener: follows the sweep.
    """

    def __init__(self, directory: SweepDirectory, plan: SweepPlan, training: Training, listener: SweepListener) -> None:
        self.directory, self.plan, self.training, self.listener = directory, plan, training, listener
        self.runs = {run.name: run for run in plan.runs}
        self.current = {run.name: self._read(run) for run in plan.runs}
        """How far each run is, by name."""
        self.data = LastData()

    def run(
        self,
        jobs: int | None = None,
        plugins: Sequence[str] = (),
        retry_failed: bool = False,
        share: RayShare | None = None,
        together: bool = False,
    ) -> Sweep:
        """Run everything that is planned or interrupted.

        Args:
            jobs: runs at once; more than one are trained in processes of their own. None: one, or on Ray as many as
                there is room for.
            plugins: local plugin files, for those processes.
            retry_failed: also try failed runs again.
            share: the share of each run on Ray; None: all runs are trained on this machine.
            together: train runs that differ only in the method's parameters or the seed in one stack.

        Raises:
            Interrupted: by Ctrl-C or a signal; the run in work is saved.
        """
        waiting = ("planned", "interrupted", *(("failed",) if retry_failed else ()))
        pending = [run for run in self.plan.runs if self.current[run.name].status in waiting]
        epochs = {name: spec.training.epochs for name, spec in self.plan.specs.items()}
        self.listener.sweep_started(self.directory.path, list(self.current.values()), epochs)
        self.write_results()
        try:
            if share is not None and pending:
                run_on_ray(RunQueue(self, pending), self.directory.path, self.listener, share, jobs, plugins)
            elif together:
                run_together(self, pending)
            elif jobs is None or jobs == 1:
                for run in pending:
                    self.finish(run, self.run_here(run))
            else:
                run_in_processes(RunQueue(self, pending), self.listener, jobs, plugins)
        except (Interrupted, KeyboardInterrupt) as error:
            raise self.interrupted(error, plugins, share, together) from error
        return self.sweep

    @property
    def sweep(self) -> Sweep:
        """The sweep as far as it is."""
        return Sweep(self.directory.path, list(self.current.values()))

    def run_here(self, run: PlannedRun, listeners: Iterable[object] = ()) -> Outcome:
        """Train or resume a run in this process; whatever goes wrong is its outcome, except for an interruption."""
        self.listener.run_started(run.name)
        path, spec = self.directory.run_path(run.name), self.plan.specs[run.name]
        followers = [RunEvents(run.name, self.listener), *listeners]
        try:
            if self.prepare(run):
                self.training.resume(path, followers)
            else:
                self.training.train(spec, path, followers, self.data.load(spec))
        except Pruned as pruned:
            return Outcome("pruned", pruned.what)
        except (Interrupted, KeyboardInterrupt):
            self.update(run)
            raise
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            return self.failure(run, error)
        return Outcome("finished")

    def failure(self, run: PlannedRun, error: BaseException) -> Outcome:
        """Return the outcome of a run that could not be trained: another process may train it just now."""
        if self.directory.is_running(run.name):
            return Outcome("running")
        known = error if isinstance(error, EnsemblekitError) else explain(error)
        return Outcome("failed", one_line(known.line))

    def prepare(self, run: PlannedRun) -> bool:
        """Make way for a run; returns whether it is to be resumed.

        What a killed process left behind before its first checkpoint is removed: there is nothing in it to lose.
        """
        path = self.directory.run_path(run.name)
        self.directory.forget_end(run.name)
        if self.directory.is_running(run.name):
            raise RunError("in use by another process", str(path), "wait until it ends, or stop it")
        if is_unstarted(path):
            shutil.rmtree(path, ignore_errors=True)
            return False
        directory = RunDirectory.open(path)
        if directory.status != "finished" and not directory.checkpoint_epochs:
            shutil.rmtree(path)
            return False
        return True

    def finish(self, run: PlannedRun, outcome: Outcome) -> None:
        """Record the end of a run in results.csv, and announce it."""
        if outcome.status in ENDED_EARLY:
            self.directory.record_end(run.name, outcome.status, outcome.error)
        self.update(run)
        self.write_results()
        self.listener.run_ended(self.current[run.name])

    def write_results(self) -> None:
        """Write results.csv."""
        self.directory.write_results(list(self.current.values()))

    def update(self, run: PlannedRun) -> None:
        """Read again how far a run is."""
        self.current[run.name] = self._read(run)

    def _read(self, run: PlannedRun) -> SweepRun:
        """Read how far a run is; a directory with another spec than planned is damaged."""
        read = self.directory.read_run(run)
        if read.status in ("planned", "damaged", "running") or is_unstarted(read.path):
            return read
        other = other_keys(read.path, self.plan.specs[run.name])
        return replace(read, status="damaged", error=f"its spec is not the planned one: {other}") if other else read

    def add(self, run: PlannedRun, spec: Spec) -> None:
        """Add a run to the plan."""
        self.plan = replace(self.plan, runs=(*self.plan.runs, run), specs={**self.plan.specs, run.name: spec})
        self.runs[run.name] = run
        self.current[run.name] = self._read(run)

    def interrupted(
        self,
        error: BaseException,
        plugins: Sequence[str] = (),
        share: RayShare | None = None,
        together: bool = False,
    ) -> Interrupted:
        """Write what there is; the error says how to continue."""
        self.listener.close()
        self.write_results()
        finished = len(self.sweep.with_status("finished"))
        saved = f" (the run in work: {error.what})" if isinstance(error, Interrupted) and error.what else ""
        what = f"{finished} of {len(self.current)} runs are finished{saved}"
        path = str(self.directory.path)
        exit_code = error.exit_code if isinstance(error, Interrupted) else Interrupted.exit_code
        command = continue_command(path, plugins, share, together)
        return Interrupted(what, path, f"continue with: {command}", exit_code=exit_code)


def continue_command(
    path: str, plugins: Sequence[str] = (), share: RayShare | None = None, together: bool = False
) -> str:
    """Return the command that continues a sweep."""
    files = [part for file in plugins for part in ("--plugin", file)]
    more = [*(share.options if share else ()), *(["--together"] if together else [])]
    return shlex.join(["ensemblekit", "sweep", path, *files, *more])


def other_keys(path: Path, spec: Spec) -> str:
    """Return the keys in which the spec of a run differs from the planned one, in words; empty if in none."""
    try:
        old = leaves(tomllib.loads((path / "spec.toml").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return "spec.toml cannot be read"
    new = leaves(spec.to_dict())
    changed = [key for key in old if key in new and key not in MACHINE_KEYS and old[key] != new[key]]
    return ", ".join(f"{key}: {new[key]} → {old[key]}" for key in changed[:5])


class LastData:
    """Keeps the data that was loaded last, since the next run often uses the same."""

    def __init__(self) -> None:
        self.key: tuple[str, int] | None = None
        self.data: Data | None = None

    def load(self, spec: Spec) -> Data:
        """Load the data of a spec, or return what was loaded last."""
        key = (spec.data.key, spec.seed if spec.data.split_seed is None else spec.data.split_seed)
        if self.data is None or key != self.key:
            self.data = None  # before the next is loaded: both may not fit in memory
            self.data, self.key = load_data(spec.data, spec.seed), key
        return self.data
