"""Files and directories that appear complete or not at all, and the checksums of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


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
    # A directory of its own, so that the block may write any number of files before the one that counts.
    with TemporaryDirectory(prefix=".writing-", dir=target.parent, ignore_cleanup_errors=True) as staging:
        staged = Path(staging, target.name)
        yield staged
        if staged.is_file():
            _sync(staged)  # or a power cut after the rename could leave an empty file under the target's name
        os.replace(staged, target)


def sha256_of_file(path: Path) -> str:
    """Compute the sha256 of a file's content, as 64 hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
