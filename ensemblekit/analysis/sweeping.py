"""The flow of a sweep: a request becomes a plan, the plan a directory, and the directory is run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemblekit.analysis.plans import SweepPlan, Tables, add_to_section, base_tables, label_of, make_plan
from ensemblekit.analysis.ray_cluster import RayShare
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_jobs import core_shares
from ensemblekit.analysis.sweep_runner import SweepRunner, Training
from ensemblekit.analysis.sweeps import SWEEP_FILE, Sweep, SweepDirectory, is_sweep
from ensemblekit.core.errors import RunError, UsageError
from ensemblekit.core.registry import Registry
from ensemblekit.spec.sections import Spec


@dataclass(frozen=True)
class SweepRequest:
    """What to sweep over.

    Args:
        source: a spec, its file or its tables; or an existing sweep directory.
        overrides: values by dotted path that all runs share.
        grid: values by dotted path, added to the grid of the spec's section [sweep].
        seeds: number of seeds; None: that of the section, or 1.
        variants: variants in place of those of the section, as tables.
        out: the sweep directory; None: `source` if that is a sweep, else a new one below sweeps/.
        name: name of a new directory.
    """

    source: Spec | str | Path | Mapping[str, Any]
    overrides: Mapping[str, Any] | None = None
    grid: Mapping[str, Any] | None = None
    seeds: int | None = None
    variants: Sequence[Mapping[str, Any]] | None = None
    out: str | Path | None = None
    name: str = "sweep"

    @property
    def directory(self) -> Path | None:
        """The sweep directory, if it is known before one is made."""
        if self.out is not None:
            return Path(self.out)
        return self._source_directory

    @property
    def _source_directory(self) -> Path | None:
        if not isinstance(self.source, str | Path):
            return None
        path = Path(self.source)
        path = path.parent if path.name == SWEEP_FILE else path
        return path if is_sweep(path) else None

    @property
    def label(self) -> str:
        """What to call the spec in errors."""
        return label_of(self.source)

    def tables(self) -> Tables:
        """Return the spec with its section [sweep], as written, with all changes."""
        source = self._source_directory
        if source is not None:
            tables = base_tables(SweepDirectory.open(source).tables, self.overrides)
        else:
            if isinstance(self.source, str | Path) and os.path.isdir(self.source):
                fix = "give a spec, or the directory of a sweep"
                raise RunError("a directory without a sweep", str(self.source), fix)
            tables = base_tables(self.source, self.overrides)
        add_to_section(tables, self.grid, self.seeds, self.variants)
        return tables

    def known_names(self) -> dict[str, str]:
        """Return the names of runs that exist already."""
        path = self.directory
        return SweepDirectory.open(path).known_names if path is not None and is_sweep(path) else {}

    def plan(self, registry: Registry, known: Mapping[str, str] | None = None) -> SweepPlan:
        """Validate everything; nothing is written."""
        return make_plan(self.tables(), registry, self.label, self.known_names() if known is None else known)


@contextmanager
def claimed_sweep(
    request: SweepRequest, registry: Registry, jobs: int | None = None
) -> Iterator[tuple[SweepDirectory, SweepPlan]]:
    """Validate a sweep, and lock its directory with the plan written in it."""
    known = request.known_names()
    plan = request.plan(registry, known)
    check_cores(plan, jobs)
    with SweepDirectory.claim(request.directory, request.name) as directory:
        if directory.record.get("search"):
            raise RunError("the directory has a search", str(directory.path), "continue it with its --search options")
        if directory.known_names != known:  # another process was faster
            plan = request.plan(registry, directory.known_names)
        directory.write_plan(plan)
        yield directory, plan


def run_sweep(
    request: SweepRequest,
    registry: Registry,
    training: Training,
    listener: SweepListener,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    retry_failed: bool = False,
    share: RayShare | None = None,
    together: bool = False,
) -> Sweep:
    """Run a sweep, or what is left of it; see `ensemblekit.sweep`."""
    check_jobs(jobs)
    with claimed_sweep(request, registry, None if share else jobs) as (directory, plan):
        for note in plan.notes:
            listener.notice(note)
        return SweepRunner(directory, plan, training, listener).run(jobs, plugins, retry_failed, share, together)


def check_jobs(jobs: int | None) -> None:
    """Raise a `UsageError` unless a number of jobs is possible."""
    if jobs is None:
        return
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= 1000:
        raise UsageError(f"{jobs!r} is not a number of jobs", "jobs", "give an integer of at least 1")


def check_cores(plan: SweepPlan, jobs: int | None) -> None:
    """Raise a `UsageError` if runs use the threaded engine, and there would be one core for each of several jobs."""
    if jobs is None or jobs == 1 or max(map(len, core_shares(jobs))) > 1:
        return
    from ensemblekit.engines.threaded import ThreadedEngine  # imports torch

    if any(plan.specs[run.name].engine.name == ThreadedEngine.name for run in plan.runs):
        what = f'the engine "{ThreadedEngine.name}" needs two cores, and each of {jobs} jobs has one'
        raise UsageError(what, "jobs", "take fewer jobs, or another engine: --set engine.name=sequential")
