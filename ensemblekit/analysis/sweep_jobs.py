"""Runs of a sweep in processes of their own, each with its share of the cores.

A process trains one run after the other, so that torch is imported once. It gets jobs as lines of JSON on its standard
input and answers with events. When its input ends, because the sweep was stopped or killed, it saves and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import IO, Any

from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.core.errors import one_line

WORKER = "ensemblekit.cli.sweep_worker"
"""The module that a process runs; it is imported in that process only."""


@dataclass(frozen=True)
class Job:
    """One run for a process."""

    name: str
    path: str
    spec: dict[str, Any]
    """The resolved spec as tables."""
    resume: bool


def core_shares(jobs: int) -> list[list[int]]:
    """Divide the cores that this process may use; more jobs than cores share them in turn."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if jobs >= len(cores):
        return [[cores[index % len(cores)]] for index in range(jobs)]
    bounds = [index * len(cores) // jobs for index in range(jobs + 1)]
    return [cores[start:end] for start, end in pairwise(bounds)]


class Worker:
    """A process that trains runs, with some of the cores."""

    def __init__(self, cores: Sequence[int], plugins: Sequence[str]) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        command = [sys.executable, "-m", WORKER, ",".join(map(str, cores)), *plugins]
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the sweep only, which asks the processes to stop
        )

    def train(self, job: Job, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Train a run and wait for its end; returns the last event, which has `status` and `error`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError, ValueError):  # a process that has ended is noticed below
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ended":
                return event
            on_event(event)
        return {"event": "ended", "status": "died", "error": self._death()}

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask the process to save and to end."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Wait for the end of the process."""
        self.stop()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()

    def _death(self) -> str:
        """Say how the process ended, with the last line of its standard error."""
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.errors.seek(0)
        lines = self.errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        last = f": {one_line(lines[-1])}" if lines else ""
        hint = "; out of memory? use fewer --jobs" if code == -signal.SIGKILL else ""
        return f"the process of the run ended ({how}{last}){hint}"


def run_in_processes(
    next_job: Callable[[], Job | None],
    ended: Callable[[str, str, str], None],
    listener: SweepListener,
    jobs: int,
    plugins: Sequence[str] = (),
) -> None:
    """Train runs in several processes until there is no next one.

    Args:
        next_job: returns the next run, or None.
        ended: told the name, the status and the error of each run that ends; both are called in this thread only.
        listener: follows the runs.
        jobs: number of processes.
        plugins: local plugin files.
    """
    events: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
    slots = [_Slot(index, cores, plugins, events) for index, cores in enumerate(core_shares(jobs))]
    active: dict[int, Job] = {}

    def start(slot: _Slot) -> None:
        job = next_job()
        if job is None:
            slot.jobs.put(None)
        else:
            active[slot.index] = job
            slot.jobs.put(job)

    def follow() -> None:
        index, event = events.get()
        name = active[index].name
        if event["event"] == "ended":
            del active[index]
            ended(name, event["status"], event["error"])
        else:
            _pass_on(name, event, listener)

    try:
        for slot in slots:
            start(slot)
        while active:
            before = set(active)
            follow()
            for index in before - set(active):
                start(slots[index])
    except BaseException:
        for slot in slots:
            slot.stop()
        while active:  # each saves first; another Ctrl-C leaves them to it
            follow()
        raise
    finally:
        for slot in slots:
            slot.stop()
        for slot in slots:
            slot.thread.join()


class _Slot:
    """A thread that feeds one process after the other: a new one if the last has died."""

    def __init__(
        self, index: int, cores: Sequence[int], plugins: Sequence[str], events: SimpleQueue[tuple[int, dict[str, Any]]]
    ) -> None:
        self.index, self.cores, self.plugins, self.events = index, cores, plugins, events
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.worker: Worker | None = None
        self.stopping = False
        self.guard = threading.Lock()
        self.thread = threading.Thread(target=self._feed, name=f"sweep-{index}", daemon=True)
        self.thread.start()

    def _feed(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                end = self._living_worker().train(job, lambda event: self.events.put((self.index, event)))
            except Exception as error:  # the sweep waits for the end of every run
                end = {"event": "ended", "status": "failed", "error": one_line(f"{type(error).__name__}: {error}")}
            if end["status"] == "died":
                end["status"] = "interrupted" if self.stopping else "failed"
            self.events.put((self.index, end))
        if self.worker is not None:
            self.worker.close()

    def _living_worker(self) -> Worker:
        with self.guard:
            if self.worker is None or not self.worker.is_alive:
                if self.worker is not None:
                    self.worker.close()
                self.worker = Worker(self.cores, self.plugins)
                if self.stopping:
                    self.worker.stop()
            return self.worker

    def stop(self) -> None:
        """Ask the process to save and to end, and the thread to end after it."""
        with self.guard:
            self.stopping = True
            if self.worker is not None:
                self.worker.stop()
        self.jobs.put(None)


def _pass_on(name: str, event: Mapping[str, Any], listener: SweepListener) -> None:
    if event["event"] == "epoch_started":
        listener.epoch_started(name, event["epoch"], event["num_epochs"])
    elif event["event"] == "epoch_finished":
        listener.epoch_finished(name, event["epoch"], event["num_epochs"], event["metrics"])
    elif event["event"] == "notice":
        listener.notice(f"{name}: {event['text']}")
