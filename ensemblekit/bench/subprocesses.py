"""A contestant in a process of its own, which works only when it is its turn.

The loop written by hand is measured like that: this package tells malloc to keep freed memory, which holds for a whole
process, and a loop written by hand does not have that.
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


class Apart:
    """What `make` returns, made and called in another process; `make` and all that is passed must be picklable."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        with _ignoring_interrupts():  # which the child inherits: Ctrl-C is for the one who waits for it
            self.process.start()
        theirs.close()

    def call(self, name: str) -> Any:
        """Call a method of it, wait, and return what that returned."""
        try:
            self.connection.send(name)
            done, answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            what = f"the process of a contestant ended with code {self.process.exitcode}"
            raise ResourceError(what, "ensemblekit bench", "free memory, try again") from None
        if not done:
            raise ChildProcessError(answer)
        return answer

    def __call__(self) -> Any:
        return self.call("__call__")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()  # which ends it
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
    made = make()
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(made, name)()))
        except Exception as error:  # it is the other process that has to tell
            connection.send((False, f"{type(error).__name__}: {error}"))
