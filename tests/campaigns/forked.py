"""Runs `ensemblekit` in forked children: torch is imported once, so that hundreds of commands take minutes."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imported before the fork: everything that a command would otherwise import in each child.
import torch  # noqa: F401
import torchvision.transforms.v2  # noqa: F401

import ensemblekit.api  # noqa: F401
from ensemblekit.cli import main


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    exit_code: int
    """As a shell gives it: 128 + the number of the signal, if one ended it."""
    output: str
    """Standard output and standard error."""
    seconds: float

    @property
    def last_line(self) -> str:
        return self.output.strip().rpartition("\n")[2]


def run(*arguments: str, folder: Path, kill_after: float | None = None) -> Outcome:
    """Run a command in a child; `kill_after` so many seconds it is killed without warning."""
    log = folder / f".output-{os.getpid()}"
    log.touch()  # the child may be killed before it opens it
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_command(arguments, folder, log)
    if kill_after is not None:
        _wait(child, start + kill_after)
    status = os.waitpid(child, 0)[1] if kill_after is None else _reap(child)
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    log.unlink()
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code if code >= 0 else 128 - code, text, seconds)


def _become_command(arguments: tuple[str, ...], folder: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    code: object = 1
    try:
        main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _wait(child: int, deadline: float) -> None:
    """Wait for the deadline, or for the end of the child, without reaping it."""
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


def _reap(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
