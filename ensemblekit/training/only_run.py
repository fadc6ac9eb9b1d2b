"""One run at a time in a process: torch's random generator and number of threads belong to the whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from ensemblekit.core.errors import UsageError


class _Turn:
    """Whose turn it is to train in this process."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.thread: int | None = None
        """The thread that trains."""


_turns: dict[int, _Turn] = {}
"""By the id of the process: a child that was forked while a run was trained is another one."""


@contextmanager
def only_run_of_process(wait: bool = False) -> Iterator[None]:
    """Train in a block, as the only run of this process.

    Args:
        wait: wait until a run that another thread trains has ended.

    Raises:
        UsageError: a run is being trained in this process, by this thread if `wait` is true.
    """
    turn = _turns.setdefault(os.getpid(), _Turn())
    if not turn.lock.acquire(blocking=wait and turn.thread != get_ident()):
        what = "another run is being trained in this process, and each would change the other's random numbers"
        raise UsageError(what, "train", "train one after the other, or each in a process of its own")
    turn.thread = get_ident()
    try:
        yield
    finally:
        turn.thread = None
        turn.lock.release()


@contextmanager
def between_runs() -> Iterator[None]:
    """Use torch's random generator in a block, as building networks does, while no other thread trains."""
    if _turns.setdefault(os.getpid(), _Turn()).thread == get_ident():
        yield
        return
    with only_run_of_process(wait=True):
        yield
