"""Where image files come from: a folder, a tar or a zip. Archives are read in place and never trusted."""

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

from ensemblekit import DataError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
ARCHIVE_SUFFIXES = (*TAR_SUFFIXES, ".zip")
DEEPEST = 5
LARGEST_FILE_BYTES = 256 * 2**20
MOST_MEMBERS = 20_000_000
LARGEST_EXPANSION = 200
LEAST_LIMIT_BYTES = 2**30
"""An archive may unpack to so much, or to so many times its own size: images hardly shrink."""


@dataclass(frozen=True)
class Entry:
    """A file or a directory of a source; `name` is relative, its parts joined by slashes."""

    name: str
    is_directory: bool


class ImageSource(Protocol):
    """What the rest of the package needs to know of a folder or an archive."""

    path: Path

    def fingerprint(self) -> str:
        """A text that changes when the contents do."""

    def entries(self) -> Sequence[Entry]:
        """Everything in it, sorted by name; raises DataError for what must not be in an archive."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Each named file's name and bytes, in the order that is fastest to read."""


def open_source(path: Path) -> ImageSource:
    """The folder or archive at a path."""
    path = path.expanduser().absolute()
    if path.is_dir():
        return Folder(path)
    if not path.exists():
        raise DataError("no such folder or archive", str(path), "set data.path to one")
    if path.name.lower().endswith(TAR_SUFFIXES):
        return TarArchive(path)
    if path.name.lower().endswith(".zip"):
        return ZipArchive(path)
    raise DataError("neither a folder nor a known archive", str(path), "known are " + ", ".join(ARCHIVE_SUFFIXES))


class Folder:
    """A folder on disk; links in it are followed, for it is the user's own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.path.resolve()).encode())
        for entry in self.entries():
            with _unreadable_is_a_data_error(file := self.path / entry.name):
                status = file.stat()
            digest.update(f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def entries(self) -> Sequence[Entry]:
        return _sorted(self._walk(self.path, ""))

    def _walk(self, folder: Path, prefix: str) -> Iterator[Entry]:
        with _unreadable_is_a_data_error(folder), os.scandir(folder) as found:
            items = [(prefix + item.name, item.is_dir()) for item in found]
        for name, is_directory in items:
            yield Entry(name, is_directory)
            if is_directory and name.count("/") < DEEPEST:
                yield from self._walk(self.path / name, name + "/")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            with _unreadable_is_a_data_error(file := self.path / name):
                contents = file.read_bytes()
            yield name, contents


class TarArchive:
    """A tar, plain or gzipped, read from front to end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        return _sha256(self.path)

    def entries(self) -> Sequence[Entry]:
        return _sorted(Entry(name, member.isdir()) for name, member in self._members.items())

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        members = {}
        with _damage_is_a_data_error(self.path), tarfile.open(self.path) as tar:
            guard = _Guard(self.path)
            for member in tar:
                guard.admit(member.name, member.size, "" if member.isreg() or member.isdir() else "a link or a device")
                members[_normal(member.name)] = member
            # tarfile takes a garbled header for the end; the true end is a block of zeros.
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it ends too early")
            while tar.fileobj.read(2**20):  # gzip compares its checksum only when it comes to its end
                pass
        return members

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        # A gzipped file can only be read forwards: a step back would unpack it from its start again.
        in_order = sorted(names, key=lambda name: self._members[name].offset)
        with _damage_is_a_data_error(self.path), tarfile.open(self.path) as tar:
            for name in in_order:
                file = tar.extractfile(self._members[name])
                assert file is not None  # it is a regular file: `_members` admits nothing else but directories
                yield name, file.read()


class ZipArchive:
    """A zip."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        return _sha256(self.path)

    def entries(self) -> Sequence[Entry]:
        return _sorted(Entry(name, member.is_dir()) for name, member in self._members.items())

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        members = {}
        with _damage_is_a_data_error(self.path), zipfile.ZipFile(self.path) as archive:
            guard = _Guard(self.path)
            for member in archive.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                fault = "" if kind in (0, stat.S_IFREG, stat.S_IFDIR) else "a link or a device"
                guard.admit(member.orig_filename, member.file_size, "encrypted" if member.flag_bits & 1 else fault)
                members[_normal(member.filename)] = member
        return members

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        with _damage_is_a_data_error(self.path), zipfile.ZipFile(self.path) as archive:
            for name in names:
                yield name, archive.read(self._members[name])


class _Guard:
    """Refuses what could write outside, follow a link, or fill the memory or the disk."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._most_bytes = max(LEAST_LIMIT_BYTES, LARGEST_EXPANSION * archive.stat().st_size)
        self._num_members = self._num_bytes = 0

    def admit(self, name: str, num_bytes: int, fault: str) -> None:
        """Raise DataError unless the member is harmless; called before its contents are touched."""
        self._num_members += 1
        self._num_bytes += num_bytes
        leads_outside = name.startswith("/") or ".." in PurePosixPath(name).parts or name[1:2] == ":"
        if leads_outside or "\\" in name or "\0" in name:
            fault = "a path that leads outside"
        elif not 0 <= num_bytes <= LARGEST_FILE_BYTES:
            fault = f"{num_bytes} bytes long, and at most {LARGEST_FILE_BYTES} are allowed"
        elif self._num_bytes > self._most_bytes:
            fault = f"one too many: the archive would unpack to more than {self._most_bytes} bytes"
        elif self._num_members > MOST_MEMBERS:
            fault = f"one too many: more than {MOST_MEMBERS}"
        if fault:
            fix = "make an archive of plain files and folders"
            raise DataError(f"archive refused: member {name!r} is {fault}", str(self._archive), fix)


@contextmanager
def _damage_is_a_data_error(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"archive is cut or damaged: {error}", str(archive), "make or fetch it again") from error


@contextmanager
def _unreadable_is_a_data_error(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", str(file), "mend or remove it") from error


def _normal(name: str) -> str:
    return str(PurePosixPath(name))


def _sorted(entries: Iterable[Entry]) -> Sequence[Entry]:
    return sorted((entry for entry in entries if entry.name != "."), key=lambda entry: entry.name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
