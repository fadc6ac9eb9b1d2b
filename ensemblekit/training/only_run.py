"""One run at a time in a process: torch's random generator and number of threads belong to the whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ensemblekit.core.errors import UsageError

_training: dict[int, object] = {}
"""For the process that trains, by its id: a child that was forked meanwhile is another one."""


@contextmanager
def only_run_of_process() -> Iterator[None]:
    """Raise a `UsageError` if another thread of this process is training a run."""
    token = object()
    if _training.setdefault(os.getpid(), token) is not token:
        what = "another run is being trained in this process, and each would change the other's random numbers"
        raise UsageError(what, "train", "train one after the other, or each in a process of its own")
    try:
        yield
    finally:
        _training.pop(os.getpid(), None)
