"""Files that are wholly old or wholly new, whatever happens: written aside, synced, renamed."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ensemblekit.core.errors import ResourceError, RunError

_STAGING = ".writing-"
# A quota or a limit on a file's size stops a run just as a full disk does.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Paths to write to, one for each target; they take the targets' places, in order, once the block has ended well.

    All targets are in one directory. Whoever reads them must rely on the last one: it comes into place last.
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
            sync(directory)  # the last one vouches for the others, so they are on the disk before it
        os.replace(staged[-1], targets[-1])
        sync(directory)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about writing to `path` into what a person can do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(f"disk full: {error.strerror}", str(path), "make room on this disk") from error
        fix = "give a directory that you may write to"
        raise RunError(f"cannot write: {error.strerror or error}", str(path), fix) from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove what writers that were killed have left behind; only for the one process that may write here."""
    for leftover in directory.glob(f"{_STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_all(descriptor: int, content: bytes) -> None:
    """Write every byte, and wait until it is on the disk; `os.write` alone may stop short of a full disk."""
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that `replacing` has given the path of."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, content)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Put one file in place, wholly or not at all."""
    with replacing(path) as (staged,):
        write_bytes(staged, content)


def json_bytes(value: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """JSON that any program can read: a number that is not finite becomes null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent).encode() + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a `RunError` that says why there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(path), "restore the file") from error
    except (ValueError, RecursionError) as error:
        raise RunError("damaged: not JSON", str(path), "restore the file") from error
    if not isinstance(value, dict):
        raise RunError("damaged: not a JSON object", str(path), "restore the file")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
