"""Atomic files: written to a temporary name, synced, renamed; a crash leaves the old content or the new one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ensemblekit.core.errors import ResourceError, RunError
from ensemblekit.runs.sealing import finite

_STAGING = ".writing-"
# A quota or a limit on a file's size stops a run just as a full disk does.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Yield temporary paths, one per target; they are renamed to the targets, in order, when the block succeeds.

    All targets are in one directory. The last target is renamed last: readers take its presence as the commit.
    """
    directory = targets[0].parent
    with (
        write_errors(targets[0]),
        TemporaryDirectory(prefix=_STAGING, dir=directory, ignore_cleanup_errors=True) as staging,
    ):
        staged = [Path(staging, target.name) for target in targets]
        yield staged
        for file, target in zip(staged[:-1], targets[:-1], strict=True):
            os.replace(file, target)
        if len(targets) > 1:
            sync(directory)  # the last target is the commit, so the others must be on the disk before it
        os.replace(staged[-1], targets[-1])
        sync(directory)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about writing to `path` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(f"disk full: {error.strerror}", str(path), "make room on this disk") from error
        fix = "give a directory that you may write to"
        raise RunError(f"cannot write: {error.strerror or error}", str(path), fix) from error


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove temporary files of killed writers; only for the process that holds the lock."""
    for leftover in directory.glob(f"{_STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_all(descriptor: int, content: bytes) -> None:
    """Write every byte and sync; on a nearly full disk `os.write` alone may write only a part."""
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write and sync a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, content)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as (staged,):
        write_bytes(staged, content)


def json_bytes(value: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """Encode as standard JSON; nan and infinity become null."""
    return json.dumps(finite(value), allow_nan=False, indent=indent).encode() + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; a `RunError` if the file is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(path), "restore the file") from error
    except (ValueError, RecursionError) as error:
        raise RunError("damaged: not JSON", str(path), "restore the file") from error
    if not isinstance(value, dict):
        raise RunError("damaged: not a JSON object", str(path), "restore the file")
    return value
