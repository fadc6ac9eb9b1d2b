"""The process that trains runs of a sweep, seen from outside.

It gets jobs as lines of JSON on its standard input and answers with events. When its input ends, because the sweep was
stopped or killed, it saves and ends. This module is imported wherever such a process is started, also by tasks on the
nodes of a cluster, so that it imports neither torch nor anything else that takes long.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from ensemblekit.core.errors import one_line

WORKER = "ensemblekit.cli.sweep_worker"
"""The module that a process runs; it is imported in that process only."""
CORES_VARIABLE = "ENSEMBLEKIT_CORES"
"""The environment variable that limits the cores of a process; see `ensemblekit.core.threads`."""


@dataclass(frozen=True)
class Job:
    """One run for a process."""

    name: str
    path: str
    spec: dict[str, Any]
    """The resolved spec as tables."""
    resume: bool


class Worker:
    """A process that trains runs, with some of the cores.

    Args:
        num_cores: number of cores that a run may use.
        cores: the cores to which the process is bound; empty: the system chooses them.
        plugins: local plugin files.
        environment: variables that the process gets besides those of this process.
        cwd: its working directory; None: that of this process.
    """

    def __init__(
        self,
        num_cores: int,
        cores: Sequence[int],
        plugins: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        command = [sys.executable, "-m", WORKER, ",".join(map(str, cores)), *plugins]
        threads = {name: str(num_cores) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", CORES_VARIABLE)}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **threads, **(environment or {})},
            cwd=cwd,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the sweep only, which asks the processes to stop
        )

    def train(self, job: Job, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Train a run and wait for its end; returns the last event, which has `status` and `error`.

        The status is that of the run, or "died" if the process ended by itself, and "killed" if a signal ended it.
        """
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
        status = "killed" if self.process.wait() < 0 else "died"
        return {"event": "ended", "status": status, "error": self._death()}

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
