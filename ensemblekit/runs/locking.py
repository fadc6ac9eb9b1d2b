"""A lock that lives as long as its process: one that was killed holds nothing."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import write_errors

_ATTEMPTS, _PAUSE_SECONDS = 100, 0.01
_held: set[int] = set()


def _release_in_child() -> None:
    """A data-loading worker must not keep the lock of a trainer that was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, with this process's id in it; `RunError` if a living process holds it."""
    descriptor = _acquire(path)
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a child that was forked inside the block
            _held.discard(descriptor)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _acquire(path: Path) -> int:
    owner = 0
    for _ in range(_ATTEMPTS):
        with write_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            except BlockingIOError:
                owner = _pid(os.pread(descriptor, 32, 0))
                os.close(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            else:
                return descriptor
        if _alive(owner):
            break
        # The lock is held but its owner has not written its id yet, or is on another machine.
        time.sleep(_PAUSE_SECONDS)
    raise RunError(f"in use by pid {owner or 'unknown'}", str(path.parent), "wait until it ends, or stop it")


def _pid(text: bytes) -> int:
    text = text.strip()
    return int(text) if text.isdigit() else 0


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # somebody else's
    except (ProcessLookupError, OverflowError):
        return False
    return True
