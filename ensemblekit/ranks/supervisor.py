"""Starts a rank again, alone, if a signal has ended it: torchrun would start all of them again.

The supervisor is the process that torchrun has started. It has imported everything and done nothing, so that a new
worker is a copy of it and ready at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ensemblekit.core.streams import report
from ensemblekit.ranks.launch import LAUNCHER, REPLACEMENTS, own_rank

MOST_REPLACEMENTS = 3
"""A rank that a signal ends more often ends all of them."""
FORWARDED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_KEY = "engine.journal"
_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""


def wants_journal(spec: Path, settings: Sequence[str] = ()) -> bool:
    """Whether a spec sets engine.journal; one that cannot be read does not, and is reported later.

    It is asked before anything is set up, so that the spec is not checked.

    Args:
        spec: its file.
        settings: values that replace some of the file, as KEY=VALUE; the last one counts.
    """
    for setting in reversed(settings):
        key, _, value = setting.partition("=")
        if key.strip() == _KEY:
            return value.strip() == "true"
    with suppress(OSError, ValueError, RecursionError):
        engine = tomllib.loads(spec.read_text(encoding="utf-8")).get("engine")
        return isinstance(engine, dict) and engine.get("journal") is True
    return False


def supervise() -> None:
    """Return in a new process, which is replaced if a signal ends it; this one ends with its exit code."""
    handlers = {number: signal.getsignal(number) for number in FORWARDED}
    environment = {LAUNCHER: str(os.getppid())}
    supervisor, replacements, stops = os.getpid(), 0, False
    while True:
        sys.stdout.flush()
        sys.stderr.flush()
        worker = os.fork()
        if worker == 0:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.update(environment)
            _end_with(supervisor)
            return

        def forward(number: int, frame: FrameType | None, worker: int = worker) -> None:
            nonlocal stops
            stops = True
            with suppress(ProcessLookupError):
                os.kill(worker, number)

        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, forward)
        _, status = os.waitpid(worker, 0)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0 or stops or replacements == MOST_REPLACEMENTS:
            _end_like(code)
        replacements += 1
        environment[REPLACEMENTS] = str(replacements)
        name = signal.Signals(-code).name
        report(f"note: rank {own_rank()} (process {worker}) was ended by {name}; it is started again, the others wait")


def _end_with(supervisor: int) -> None:
    """Let this process end when its supervisor does, where the system can do that, and give it signals only once."""
    os.setpgid(0, 0)  # torchrun signals the whole group of the supervisor, which forwards to this process
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def _end_like(code: int) -> None:
    """End as the worker has: with its exit code, or by the same signal."""
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))
