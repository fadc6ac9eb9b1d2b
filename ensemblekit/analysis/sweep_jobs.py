"""Runs of a sweep in processes of their own, each with its share of the cores.

A process trains one run after the other, so that torch is imported once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_process import Job, Worker
from ensemblekit.analysis.sweep_queue import RunQueue
from ensemblekit.core.errors import one_line


def core_shares(jobs: int) -> list[list[int]]:
    """Divide the cores that this process may use; more jobs than cores share them in turn."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if jobs >= len(cores):
        return [[cores[index % len(cores)]] for index in range(jobs)]
    bounds = [index * len(cores) // jobs for index in range(jobs + 1)]
    return [cores[start:end] for start, end in pairwise(bounds)]


def run_in_processes(queue: RunQueue, listener: SweepListener, jobs: int, plugins: Sequence[str] = ()) -> None:
    """Train runs in several processes until there is no next one.

    Args:
        queue: the runs; it is used in this thread only.
        listener: follows the runs.
        jobs: number of processes.
        plugins: local plugin files.
    """
    events: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
    slots = [_Slot(index, cores, plugins, events) for index, cores in enumerate(core_shares(jobs))]
    active: dict[int, Job] = {}

    def start(slot: _Slot) -> None:
        job = queue.next_job()
        if job is None:
            slot.jobs.put(None)
        else:
            listener.run_started(job.name)
            active[slot.index] = job
            slot.jobs.put(job)

    def follow() -> None:
        index, event = events.get()
        name = active[index].name
        if event["event"] == "ended":
            del active[index]
            queue.ended(name, event["status"], event["error"])
        else:
            pass_on(name, event, listener)

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
            if end["status"] in ("died", "killed"):
                end["status"] = "interrupted" if self.stopping else "failed"
            self.events.put((self.index, end))
        if self.worker is not None:
            self.worker.close()

    def _living_worker(self) -> Worker:
        with self.guard:
            if self.worker is None or not self.worker.is_alive:
                if self.worker is not None:
                    self.worker.close()
                self.worker = Worker(len(self.cores), self.cores, self.plugins)
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


def pass_on(name: str, event: Mapping[str, Any], listener: SweepListener) -> None:
    """Tell the listener of a sweep an event of one of its runs."""
    if event["event"] == "epoch_started":
        listener.epoch_started(name, event["epoch"], event["num_epochs"])
    elif event["event"] == "epoch_finished":
        listener.epoch_finished(name, event["epoch"], event["num_epochs"], event["metrics"])
    elif event["event"] == "notice":
        listener.notice(f"{name}: {event['text']}")
