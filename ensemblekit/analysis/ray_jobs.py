"""Runs of a sweep as tasks of Ray, each with its share of a node; a run whose task is lost is resumed by another."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ensemblekit.analysis.ray_cluster import RayCluster, RayShare, connected, task_error
from ensemblekit.analysis.ray_tasks import train_run
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_jobs import pass_on
from ensemblekit.analysis.sweep_process import Job
from ensemblekit.analysis.sweep_queue import RunQueue
from ensemblekit.core.errors import Interrupted, UsageError
from ensemblekit.training.interruption import stop_requests

MAX_TASKS = 1000
"""Tasks that are submitted at once; Ray starts them as nodes have room."""
MAX_LOSSES = 3
"""How often a run may be lost without finishing an epoch in between."""
RELEASE_SECONDS = 0.5
"""Time between two looks at whether a lost run is released."""


def run_on_ray(
    queue: RunQueue,
    directory: Path,
    listener: SweepListener,
    share: RayShare,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
) -> None:
    """Train runs on Ray until there is no next one.

    Args:
        queue: the runs.
        directory: the sweep directory, locked.
        listener: follows the runs.
        share: the share of a node that each run gets.
        jobs: runs at once, at most; None: as many as the nodes have room for.
        plugins: local plugin files.

    Raises:
        RunError: a node does not share the directory.
        ResourceError: Ray does not start.
        Interrupted: by Ctrl-C or a signal; the runs in work are saved.
    """
    path, files = directory.absolute(), [os.path.abspath(file) for file in plugins]
    with stop_requests() as request:
        try:
            with connected() as cluster, cluster.shared(path, path / ".lock", files) as token:
                RayRuns(cluster, queue, listener, share, {**token, "plugins": files}).run(jobs or MAX_TASKS)
        except KeyboardInterrupt as error:
            raise Interrupted("", exit_code=request.exit_code) from error


class RayRuns:
    """The tasks of one sweep.

    Args:
        cluster: the connection to Ray.
        queue: the runs.
        listener: follows them.
        share: the share of a node that each run gets.
        request: what all tasks are told.
    """

    def __init__(
        self,
        cluster: RayCluster,
        queue: RunQueue,
        listener: SweepListener,
        share: RayShare,
        request: Mapping[str, Any],
    ) -> None:
        self.cluster, self.ray, self.queue, self.listener = cluster, cluster.ray, queue, listener
        self.share, self.request = share, {**request, "cpus": share.cpus, "cwd": os.getcwd()}
        self.active: dict[Any, str] = {}
        """The streams of events of all tasks, each with the name of its run."""
        self.nodes: dict[str, str] = {}
        """The node on which each run was started last."""
        self.losses: Counter[str] = Counter()
        self.checked: set[float] = set()
        self.stopping = False

    def run(self, limit: int) -> None:
        """Submit tasks, at most `limit` at a time, and follow them to their ends."""
        try:
            while True:
                while len(self.active) < limit and (job := self.queue.next_job()) is not None:
                    self._submit(job)
                if not self.active and not self.queue.is_waiting:
                    return
                self._follow()
        except BaseException:
            self._stop()
            raise

    def _submit(self, job: Job) -> None:
        gpus = self.cluster.gpus_of(self.share, job.spec["engine"]["device"])
        self._check_room(gpus)
        # A lost task is not retried by Ray but by the sweep, which knows from which checkpoint.
        task = self.ray.remote(train_run).options(
            name=f"ensemblekit {job.name}",
            num_cpus=self.share.cpus,
            num_gpus=gpus,
            num_returns="streaming",
            max_retries=0,
        )
        stream = task.remote(json.dumps({**self.request, "gpus": gpus, "job": asdict(job)}))
        self.active[stream] = job.name

    def _check_room(self, gpus: float) -> None:
        """Say that no node is large enough: Ray itself would wait without a word."""
        if gpus in self.checked:
            return
        self.checked.add(gpus)
        problem = self.cluster.room_problem(self.share.cpus, gpus)
        if problem and self.cluster.is_own:
            raise UsageError(problem, "--cpus-per-run, --gpus-per-run", "give each run less")
        if problem:
            self.listener.notice(f"{problem}; runs wait until one joins")

    def _follow(self) -> None:
        """Wait for the next event of any run, and pass it on."""
        if not self.active:
            time.sleep(RELEASE_SECONDS)
            return
        timeout = RELEASE_SECONDS if self.queue.is_waiting else None
        ready, _ = self.ray.wait(list(self.active), num_returns=1, timeout=timeout)
        for stream in ready:
            name = self.active[stream]
            event = self._event(stream)
            del self.active[stream]
            if event["event"] == "ended":
                self._ended(name, event["status"], event["error"])
                continue
            self.active[stream] = name  # behind the others, which are asked before it is asked again
            if event["event"] == "run_started":
                self.nodes[name] = event["node"]
                self.listener.run_started(name)
            elif event["event"] == "epoch_finished":
                del self.losses[name]
            pass_on(name, event, self.listener)

    def _event(self, stream: Any) -> dict[str, Any]:
        """Read the next event of a task; whatever happened to the task is an event, too."""
        errors = self.ray.exceptions
        try:
            event: dict[str, Any] = json.loads(self.ray.get(next(stream)))
            return event
        except StopIteration:
            status, error = "killed", "its task ended without an answer"
        except errors.TaskCancelledError:
            status, error = "interrupted", ""
        except errors.RayTaskError as raised:
            status, error = "failed", task_error(raised)
        except errors.RayError as raised:
            status, error = "killed", task_error(raised)
        return {"event": "ended", "status": status, "error": error}

    def _ended(self, name: str, status: str, error: str) -> None:
        if status in ("finished", "failed", "died"):
            self.queue.ended(name, "failed" if status == "died" else status, error)
        elif self.stopping:
            self.queue.ended(name, "interrupted", "")
        elif self.losses[name] < MAX_LOSSES:
            self.losses[name] += 1
            where = f" on node {self.nodes[name]}" if name in self.nodes else ""
            self.listener.notice(f"{name}: lost{where} ({error or 'its process was stopped'}); it will be resumed")
            self.queue.lost(name)
        else:
            what = f"lost {MAX_LOSSES + 1} times without finishing an epoch, the last time: {error}"
            self.queue.ended(name, "failed", what)

    def _stop(self) -> None:
        """Ask all tasks to save and to end, and wait for them; another Ctrl-C leaves them to it."""
        self.stopping = True
        for stream in self.active:
            self.ray.cancel(stream)
        while self.active:
            self._follow()
