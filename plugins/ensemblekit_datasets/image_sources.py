"""Sources of image files: a folder, a tar or a zip archive. Archives are read in place and never trusted."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

from ensemblekit import DataError, sha256_of_file

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
ARCHIVE_SUFFIXES = (*TAR_SUFFIXES, ".zip")
MAX_DEPTH = 5
"""Folders are searched to this depth."""
MAX_FILE_BYTES = 256 * 2**20
MAX_MEMBERS = 20_000_000
MAX_EXPANSION = 200
"""An archive may unpack to this many times its size; images hardly compress, so that more is probably an attack."""
ALWAYS_ALLOWED_BYTES = 2**30
"""An archive may unpack to this many bytes, however small it is."""


@dataclass(frozen=True)
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

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Read files by name; yields (name, content) in the order that is fastest to read."""


def open_source(path: Path) -> ImageSource:
    """Open the folder or archive at a path; a `DataError` if it is neither."""
    path = path.expanduser().absolute()
    if path.is_dir():
        return Folder(path)
    if not path.exists():
        raise DataError("no such folder or archive", str(path), "set data.path to an existing one")
    if path.name.lower().endswith(TAR_SUFFIXES):
        return TarArchive(path)
    if path.name.lower().endswith(".zip"):
        return ZipArchive(path)
    raise DataError("neither a folder nor a supported archive", str(path), "use " + ", ".join(ARCHIVE_SUFFIXES))


class Folder:
    """A folder on disk; unlike those in an archive, links in it are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.path.resolve()).encode())
        for entry in self.entries():
            with _read_errors(file := self.path / entry.name):
                status = file.stat()
            digest.update(f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def entries(self) -> Sequence[Entry]:
        return _sorted(self._walk(self.path, ""))

    def _walk(self, folder: Path, prefix: str) -> Iterator[Entry]:
        with _read_errors(folder), os.scandir(folder) as scan:
            items = [(prefix + item.name, item.is_dir()) for item in scan]
        for name, is_directory in items:
            yield Entry(name, is_directory)
            if is_directory and name.count("/") < MAX_DEPTH:
                yield from self._walk(self.path / name, name + "/")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            with _read_errors(file := self.path / name):
                contents = file.read_bytes()
            yield name, contents


class TarArchive:
    """A tar archive, plain or gzipped, read from start to end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        return sha256_of_file(self.path)

    def entries(self) -> Sequence[Entry]:
        return _sorted(Entry(name, member.isdir()) for name, member in self._members.items())

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        members = {}
        with _archive_errors(self.path), tarfile.open(self.path) as tar:
            guard = _Guard(self.path)
            for member in tar:
                guard.admit(member.name, member.size, "" if member.isreg() or member.isdir() else "a link or a device")
                members[_normal(member.name)] = member
            # tarfile takes a damaged header for the end of the archive; the true end is a block of zeros.
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("unexpected end")
            while tar.fileobj.read(2**20):  # gzip verifies its checksum only at the end
                pass
        return members

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        # A gzipped file can only be read forwards: going back would decompress it from the start again.
        in_order = sorted(names, key=lambda name: self._members[name].offset)
        with _archive_errors(self.path), tarfile.open(self.path) as tar:
            for name in in_order:
                file = tar.extractfile(self._members[name])
                assert file is not None  # a regular file: `_members` admits only these and directories
                yield name, file.read()


class ZipArchive:
    """A zip archive."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        return sha256_of_file(self.path)

    def entries(self) -> Sequence[Entry]:
        return _sorted(Entry(name, member.is_dir()) for name, member in self._members.items())

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        members = {}
        with _archive_errors(self.path), zipfile.ZipFile(self.path) as archive:
            guard = _Guard(self.path)
            for member in archive.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                fault = "" if kind in (0, stat.S_IFREG, stat.S_IFDIR) else "a link or a device"
                guard.admit(member.orig_filename, member.file_size, "encrypted" if member.flag_bits & 1 else fault)
                members[_normal(member.filename)] = member
        return members

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        with _archive_errors(self.path), zipfile.ZipFile(self.path) as archive:
            for name in names:
                yield name, archive.read(self._members[name])


class _Guard:
    """Rejects archive members that could write outside the folder, follow a link, or fill the memory or the disk."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._max_bytes = max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * archive.stat().st_size)
        self._num_members = self._num_bytes = 0

    def admit(self, name: str, num_bytes: int, fault: str) -> None:
        """Raise a `DataError` unless a member is harmless; called before its content is read."""
        self._num_members += 1
        self._num_bytes += num_bytes
        leads_outside = name.startswith("/") or ".." in PurePosixPath(name).parts or name[1:2] == ":"
        if leads_outside or "\\" in name or "\0" in name:
            fault = "a path that leads outside the archive"
        elif not 0 <= num_bytes <= MAX_FILE_BYTES:
            fault = f"{num_bytes} bytes long, but at most {MAX_FILE_BYTES} are allowed"
        elif self._num_bytes > self._max_bytes:
            fault = f"one too many: the archive would unpack to more than {self._max_bytes} bytes"
        elif self._num_members > MAX_MEMBERS:
            fault = f"one too many: more than {MAX_MEMBERS}"
        if fault:
            fix = "create an archive of plain files and folders"
            raise DataError(f"unsafe archive: member {name!r} is {fault}", str(self._archive), fix)


@contextmanager
def _archive_errors(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(
            f"archive is truncated or damaged: {error}", str(archive), "create or download it again"
        ) from error


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", str(file), "make it readable or remove it") from error


def _normal(name: str) -> str:
    return str(PurePosixPath(name))


def _sorted(entries: Iterable[Entry]) -> Sequence[Entry]:
    return sorted((entry for entry in entries if entry.name != "."), key=lambda entry: entry.name)
