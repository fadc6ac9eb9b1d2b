"""A file lock that the system releases when its process ends, however it ends."""

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
    """Close inherited locks: a data-loading worker must not keep the lock of a trainer that was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, with this process's id in it; a `RunError` if a living process holds it."""
    descriptor = _acquire(path)
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # false in a child that was forked inside the block
            _held.discard(descriptor)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _acquire(path: Path) -> int:
    owner = 0
    for _ in range(_ATTEMPTS):
        with write_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
                if _is_file(descriptor, path):
                    return descriptor
                os.close(descriptor)  # the last owner has removed the file
                continue
        if _alive(owner):
            break
        # the owner has not written its id yet, or runs on another machine
        time.sleep(_PAUSE_SECONDS)
    raise RunError(f"in use by pid {owner or 'unknown'}", str(path.parent), "wait until it ends, or stop it")


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock; changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


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
