"""A contestant in a process of its own, which is idle except in its turn.

The hand-written loop is measured like this: the command line tells malloc to keep freed memory, and threads to spin
less, for its whole process, and a hand-written loop would not have these advantages.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from ensemblekit.core.errors import ResourceError
from ensemblekit.core.waiting import default_spinning


class SubprocessContestant:
    """An object that lives in another process; calling this calls it.

    Args:
        make: Builds the object, in the other process; must be picklable.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_connection, make), daemon=True)
        # the child inherits both: Ctrl-C is handled by the parent alone
        with default_spinning(), _ignoring_interrupts():
            self.process.start()
        child_connection.close()

    def call(self, name: str) -> Any:
        """Call a method of the object, wait, and return the result."""
        self.begin(name)
        return self.result()

    def begin(self, name: str) -> None:
        """Call a method of the object, and do not wait."""
        try:
            self.connection.send(name)
        except OSError:
            raise self._ended() from None

    def result(self) -> Any:
        """Wait for the call that was begun, and return its result."""
        try:
            succeeded, result = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if not succeeded:
            raise ChildProcessError(result)
        return result

    def _ended(self) -> ResourceError:
        self.process.join()
        what = f"the process of a contestant ended with code {self.process.exitcode}"
        return ResourceError(what, "ensemblekit bench", "free some memory and try again")

    def __call__(self) -> Any:
        return self.call("__call__")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()
        self.process.kill()  # it is idle, and to end by itself it would take a second
        self.process.join()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Connection, make: Callable[[], object]) -> None:
    contestant = make()
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(contestant, name)()))
        except Exception as error:  # the parent reports it
            connection.send((False, f"{type(error).__name__}: {error}"))
