"""Files and directories that appear complete or not at all, and the checksums of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

STAGING = ".writing-"
"""The names of temporary directories begin like this; a killed writer leaves one behind."""


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`, which is renamed to `target` when the block ends without an error.

    A reader sees the old content or all of the new content, even if the process is killed or the disk fills up. If the
    block raises, the temporary file is removed and an existing target stays as it was.

    Args:
        target: File or directory to create. Missing parent directories are created. An existing file is replaced; an
            existing directory must be empty.

    Yields:
        The path to write to: a file or a directory of the target's name, which the block has to create.

    Raises:
        OSError: The directory cannot be written, the disk is full, or the block created nothing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writes(target) as (staged,):
        yield staged


@contextmanager
def atomic_writes(*targets: Path) -> Iterator[list[Path]]:
    """Yield temporary paths, one per target of one directory; see `atomic_write`.

    They are renamed in order. The last target is the commit: the others are on the disk before it is renamed.
    """
    directory = targets[0].parent
    # A directory of its own, so that the block may write any number of files before the ones that count.
    with TemporaryDirectory(prefix=STAGING, dir=directory, ignore_cleanup_errors=True) as staging:
        staged = [Path(staging, target.name) for target in targets]
        yield staged
        for file in staged:
            if file.is_file():
                sync(file)  # or a power cut after the rename could leave an empty file under the target's name
        for file, target in zip(staged[:-1], targets[:-1], strict=True):
            os.replace(file, target)
        if len(targets) > 1:
            sync(directory)
        os.replace(staged[-1], targets[-1])
        sync(directory)


def sha256_of_file(path: Path) -> str:
    """Compute the sha256 of a file's content, as 64 hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
