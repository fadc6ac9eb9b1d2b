"""A contestant in a process of its own, which works only when it is its turn.

The loop written by hand is measured like that: this package tells malloc to keep freed memory, which holds for a whole
process, and a loop written by hand does not have that.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self


class Apart:
    """What `make` returns, made and called in another process; `make` and all that is passed must be picklable."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str) -> Any:
        """Call a method of it, wait, and return what that returned."""
        self.connection.send(name)
        try:
            done, answer = self.connection.recv()
        except EOFError:
            raise ChildProcessError(f"the process of a contestant ended with code {self.process.exitcode}") from None
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
