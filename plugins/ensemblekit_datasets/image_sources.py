"""Sources of image files: a folder, or an archive of one."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ensemblekit import DataError

MAX_DEPTH = 5
"""Folders are searched to this depth."""
MAX_FILE_BYTES = 256 * 2**20
"""Largest size of an image file; an uncompressed image of the largest number of pixels hardly exceeds it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a directory of a source; `name` is its relative path with forward slashes."""

    name: str
    is_directory: bool


class ImageSource(Protocol):
    """A folder or an archive of image files."""

    path: Path

    def fingerprint(self) -> str:
        """Return a text that changes if the content does."""

    def entries(self) -> Sequence[Entry]:
        """List everything in it, sorted by name; a `DataError` if an archive has an unsafe member."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | DataError]]:
        """Read files by name; yields (name, content, or why it cannot be read) in the order that is fastest to read."""


def open_source(path: Path) -> ImageSource:
    """Open the folder or archive at a path; a `DataError` if it is neither."""
    from ensemblekit_datasets.archives import TAR_SUFFIXES, TarArchive, ZipArchive

    # Not Path.expanduser and Path.exists: they raise for an unknown user and for names that are too long.
    path = Path(os.path.expanduser(path)).absolute()
    if os.path.isdir(path):
        return Folder(path)
    if not os.path.exists(path):
        raise DataError("no such folder or archive", str(path), "set data.path to an existing one")
    if path.name.lower().endswith(TAR_SUFFIXES):
        return TarArchive(path)
    if path.name.lower().endswith(".zip"):
        return ZipArchive(path)
    suffixes = ", ".join((*TAR_SUFFIXES, ".zip"))
    raise DataError("neither a folder nor a supported archive", str(path), f"use {suffixes}")


class Folder:
    """A folder on disk; unlike those in an archive, links in it are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        digest = hashlib.sha256(os.fsencode(self.path.resolve()))
        for entry in self.entries():
            try:
                status = (self.path / entry.name).stat()
                state = f"{status.st_size}\0{status.st_mtime_ns}"
            except OSError:  # a link that leads nowhere, for example; whether it matters depends on its name
                state = "unreadable"
            digest.update(f"{entry.name}\0{state}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def entries(self) -> Sequence[Entry]:
        return sorted_entries(self._walk(self.path, ""))

    def _walk(self, folder: Path, prefix: str) -> Iterator[Entry]:
        with read_errors(folder), os.scandir(folder) as scan:
            items = [(prefix + item.name, _is_directory(item)) for item in scan]
        for name, is_directory in items:
            yield Entry(name, is_directory)
            if is_directory and name.count("/") < MAX_DEPTH:
                yield from self._walk(self.path / name, name + "/")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | DataError]]:
        for name in names:
            try:
                yield name, _content(self.path / name)
            except DataError as error:
                yield name, error


def _content(file: Path) -> bytes:
    with read_errors(file):
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise DataError("not a regular file", str(file), "replace or remove it")
        with file.open("rb") as opened:
            # Python allocates as much as is asked for, so the limit alone would cost more than reading a small file.
            content = opened.read(min(status.st_size, MAX_FILE_BYTES) + 1)
    if len(content) > MAX_FILE_BYTES:
        what = f"image file is larger than {MAX_FILE_BYTES // 2**20} MiB"
        raise DataError(what, str(file), "make the image smaller or remove it")
    return content


@contextmanager
def read_errors(file: Path) -> Iterator[None]:
    """Turn a failure to read a file or folder into a `DataError` that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", str(file), "make it readable or remove it") from error


def sorted_entries(entries: Iterable[Entry]) -> Sequence[Entry]:
    """Sort entries by name, without the one for the root."""
    return sorted((entry for entry in entries if entry.name != "."), key=lambda entry: entry.name)


def _is_directory(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False
