"""Ctrl-C, SIGTERM and SIGHUP: training is asked to stop and saves first; elsewhere, or the second time, at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ensemblekit.core.errors import Interrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
NOTHING_STARTED = ("nothing was started yet", "", "run the command again")


class StopRequest:
    """Whether, and by which signal, the program was asked to stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.is_awaited = False
        """Whether the program looks at the request by itself; if not, a signal ends it at once."""
        self.outcome = NOTHING_STARTED
        """What a stop at once leaves behind: what is told, the place, and what to do."""

    @property
    def exit_code(self) -> int:
        """The exit code that a shell gives to a program that was ended by that signal."""
        return 128 + (self.signal_number or signal.SIGINT)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Look at the request by oneself in a block: the first signal then does not end the program."""
        before, self.is_awaited = self.is_awaited, True
        try:
            yield
        finally:
            self.is_awaited = before

    def error(self, stopped: KeyboardInterrupt) -> Interrupted:
        """Return the error that says what a stop at once leaves behind, unless whoever was stopped says it."""
        what, where, fix = stopped.args if len(stopped.args) == len(self.outcome) else self.outcome
        return Interrupted(what, where, fix, exit_code=self.exit_code)


_current: StopRequest | None = None
"""The request of the outermost block in the main thread."""


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn signals into a request, or into `Interrupted` where nobody awaits one; blocks inside share the request.

    Signals that the process ignores, as under nohup, stay ignored. Outside the main thread, where Python delivers no
    signals, there is only a request that nobody makes.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    if _current is not None:
        yield _current
        return
    request = _current = StopRequest()

    def handler(number: int, frame: FrameType | None) -> None:
        is_first = request.signal_number is None
        if is_first:
            request.signal_number = number
        if not (is_first and request.is_awaited):
            raise KeyboardInterrupt

    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield request
    except KeyboardInterrupt as error:
        raise request.error(error) from error
    finally:
        _current = None
        for number, previous in before.items():
            signal.signal(number, previous)
