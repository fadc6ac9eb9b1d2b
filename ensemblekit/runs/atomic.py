"""Atomic files: written to a temporary name, synced, renamed; a crash leaves the old content or the new one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ensemblekit.core.errors import ResourceError, RunError
from ensemblekit.core.files import STAGING, atomic_writes

# A quota or a limit on a file's size stops a run just as a full disk does.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Yield temporary paths, one per target; they are renamed to the targets, in order, when the block succeeds.

    All targets are in one directory. The last target is renamed last: readers take its presence as the commit.
    """
    with write_errors(targets[0]), atomic_writes(*targets) as staged:
        yield staged


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about writing to `path` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(f"disk full: {error.strerror}", str(path), "make room on this disk") from error
        if error.errno == errno.ELOOP:
            raise RunError("a symbolic link, which is never followed", str(path), "remove the link") from error
        fix = "give a directory that you may write to"
        raise RunError(f"cannot write: {error.strerror or error}", str(path), fix) from error


def sweep(directory: Path) -> None:
    """Remove temporary files of killed writers; only for the process that holds the lock."""
    for leftover in directory.glob(f"{STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write every byte; on a nearly full disk `os.write` alone may write only a part."""
    while content:
        content = content[os.write(descriptor, content) :]


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file."""
    write_parts(path, [content])


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file of several parts, one after the other."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        for part in parts:
            write_all(descriptor, part)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as (staged,):
        write_bytes(staged, content)
