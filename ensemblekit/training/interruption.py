"""Ctrl-C and SIGTERM during training: the first asks the loop to stop, a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether, and by which signal, the program was asked to stop."""

    signal_number: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that a shell gives to a program that was ended by that signal."""
        return 128 + (self.signal_number or 0)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the first signal into a request; outside the main thread, where Python delivers no signals, do nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if request.signal_number is not None:
            raise KeyboardInterrupt
        request.signal_number = number

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
