"""The process of `ensemblekit sweep --jobs N` or `--on ray`: trains the runs that it reads from standard input."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any

from ensemblekit.core.errors import EnsemblekitError, Interrupted, explain, one_line
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.core.registry import Registry, discover


def main(cores: str, *plugins: str) -> None:
    """Train runs until standard input ends; then save the one in work."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # tasks of Ray block it, and processes inherit that
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])  # before torch counts the cores
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is not an answer

    registry = discover(plugins)
    jobs = _Jobs()
    while (job := jobs.next()) is not None:
        status, error = _train(job, registry, RunEvents(answers))
        answer(answers, event="ended", status=status, error=error)
        if status == "interrupted":
            return


def _train(job: Mapping[str, Any], registry: Registry, events: object) -> tuple[str, str]:
    """Train or resume a run; returns how it ended."""
    from ensemblekit import api
    from ensemblekit.spec.reader import load_spec

    try:
        if job["resume"]:
            api.resume_run(job["path"], registry, [events])
        else:
            api.run_spec(load_spec(job["spec"], None, registry), registry, job["path"], [events])
    except (Interrupted, KeyboardInterrupt):
        return "interrupted", ""
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        known = error if isinstance(error, EnsemblekitError) else explain(error)
        return "failed", one_line(known.line)
    return "finished", ""


class RunEvents:
    """Writes what happens in a run as lines of JSON."""

    def __init__(self, answers: IO[str]) -> None:
        self.answers = answers

    @hookimpl
    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        answer(self.answers, event="epoch_started", epoch=epoch, num_epochs=num_epochs)

    @hookimpl
    def epoch_finished(self, epoch: int, num_epochs: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        answer(self.answers, event="epoch_finished", epoch=epoch, num_epochs=num_epochs, metrics=numbers)

    @hookimpl
    def notice(self, text: str) -> None:
        answer(self.answers, event="notice", text=text)


def answer(answers: IO[str], **event: Any) -> None:
    """Write one event; a sweep that is gone cannot read it, and the run is saved all the same."""
    with suppress(OSError, ValueError):
        answers.write(json.dumps(event) + "\n")
        answers.flush()


class _Jobs:
    """Reads jobs in a thread, so that the end of the input is noticed while a run is trained."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.is_busy = self.has_ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.queue.put(json.loads(line))
        self.has_ended = True
        self.queue.put(None)
        if self.is_busy:
            os.kill(os.getpid(), signal.SIGINT)

    def next(self) -> dict[str, Any] | None:
        """Wait for the next job; None at the end of the input."""
        self.is_busy = False
        job = self.queue.get()
        self.is_busy = True
        return None if self.has_ended else job


if __name__ == "__main__":
    main(*sys.argv[1:])
