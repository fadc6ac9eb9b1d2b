"""The runs that are left of a sweep, as jobs for other processes; a run whose process was lost comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemblekit.analysis.grids import PlannedRun
from ensemblekit.analysis.sweep_process import Job
from ensemblekit.core.errors import EnsemblekitError

if TYPE_CHECKING:
    from ensemblekit.analysis.sweep_runner import SweepRunner

SAVING_SECONDS = 120
"""Time that a process whose parent was lost has to save its run and to release it."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "finished", "failed" or "pruned"; "running" if another process trains it."""

    status: str
    error: str = ""


class RunQueue:
    """Hands out the runs of a sweep, and records how they end.

    Args:
        runner: the sweep.
        pending: the runs that are left.
    """

    def __init__(self, runner: SweepRunner, pending: Sequence[PlannedRun]) -> None:
        self.runner = runner
        self.pending = list(pending[::-1])
        self.running: dict[str, PlannedRun] = {}
        self.released_until: dict[str, float] = {}
        """Lost runs that another process may still be saving, each with the time at which to give up."""

    @property
    def is_waiting(self) -> bool:
        """Whether a lost run is not released yet."""
        return bool(self.released_until)

    def next_job(self) -> Job | None:
        """Return the next run that can be trained; None if there is none now."""
        self._take_back()
        while self.pending:
            run = self.pending.pop()
            job = self._job_of(run)
            if isinstance(job, Job):
                self.running[run.name] = run
                return job
            self.runner.listener.run_started(run.name)
            self.runner.finish(run, job)
        return None

    def ended(self, name: str, status: str, error: str) -> None:
        """Record the end of a run."""
        run = self.running.pop(name)
        self._refresh(name)
        if status == "interrupted":
            self.runner.update(run)
        else:
            self.runner.finish(run, Outcome(status, error))

    def lost(self, name: str) -> None:
        """Take back a run whose process was lost; `next_job` returns it again once it is released."""
        self.released_until[name] = time.monotonic() + SAVING_SECONDS

    def _take_back(self) -> None:
        for name, deadline in list(self.released_until.items()):
            self._refresh(name)
            if not self.runner.directory.is_running(name) or time.monotonic() > deadline:
                del self.released_until[name]
                self.pending.append(self.running.pop(name))

    def _job_of(self, run: PlannedRun) -> Job | Outcome:
        try:
            resume = self.runner.prepare(run)
        except (EnsemblekitError, OSError) as error:
            return self.runner.failure(run, error)
        path = self.runner.directory.run_path(run.name).absolute()
        return Job(run.name, str(path), self.runner.plan.specs[run.name].to_dict(), resume)

    def _refresh(self, name: str) -> None:
        """List the directory of a run: a network file system then forgets what it remembers of it."""
        path = self.runner.directory.run_path(name)
        for directory in (path.parent, path):
            with suppress(OSError):
                os.listdir(directory)
