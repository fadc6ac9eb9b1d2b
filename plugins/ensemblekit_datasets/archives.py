"""Tar and zip archives of image files. They are read in place and never trusted: limits hold before unpacking."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, cast

from ensemblekit import DataError, memory_limit, sha256_of_file
from ensemblekit_datasets import image_sources
from ensemblekit_datasets.image_sources import Entry, read_errors, sorted_entries

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
MAX_EXPANSION = 200
"""An archive may unpack to this many times its size; images hardly compress, so that more is probably an attack."""
ALWAYS_ALLOWED_BYTES = 2**30
"""An archive may unpack to this many bytes, however small it is."""
MIN_BYTES_PER_MEMBER = 32
"""Fewer bytes of an archive cannot hold an image, its name and its header, even compressed."""
ALWAYS_ALLOWED_MEMBERS = 100_000
MEMORY_PER_MEMBER = 2048
"""Memory for one member of an archive in the lists of members, classes and images, rounded up."""
SHARE_FOR_MEMBERS = 0.25
"""Share of the memory that these lists may take."""
MAX_HEADER_BYTES = 2**20
"""Long names and other attributes of a member of a tar archive; its own header has 512 bytes."""


class TarArchive:
    """A tar archive, plain or gzipped, read from start to end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        with read_errors(self.path):
            return sha256_of_file(self.path)

    def entries(self) -> Sequence[Entry]:
        return sorted_entries(Entry(name, member.is_directory) for name, member in self._members.items())

    @cached_property
    def _members(self) -> dict[str, _TarMember]:
        members = {}
        with self._open() as file:
            guard = _Guard(self.path)
            file.allow(MAX_HEADER_BYTES)
            with tarfile.open(fileobj=cast("IO[bytes]", file), mode="r:") as tar:
                while (member := tar.next()) is not None:
                    guard.admit(member.name, member.size, _fault_of_tar_member(member))
                    members[_normal(member.name)] = _TarMember(member.offset_data, member.size, member.isdir())
                    # tarfile keeps all members and all global attributes, however many there are
                    tar.members.clear()  # type: ignore[attr-defined]
                    tar.pax_headers = {}
                    file.allow(MAX_HEADER_BYTES)
                file.check_end(tar.offset)
        return members

    @contextmanager
    def _open(self) -> Iterator[_BoundedFile]:
        with ExitStack() as stack:
            stack.enter_context(_archive_errors(self.path))
            raw: IO[bytes] = stack.enter_context(self.path.open("rb"))
            is_compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_compressed else raw
            yield _BoundedFile(cast("IO[bytes]", file), self.path)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | DataError]]:
        # A gzipped file can only be read forwards: going back would decompress it from the start again.
        in_order = sorted(names, key=lambda name: self._members[name].offset)
        with self._open() as file:
            for name in in_order:
                member = self._members[name]
                file.seek(member.offset)
                file.allow(member.size)
                content = file.read(member.size)
                if len(content) < member.size:
                    raise tarfile.ReadError("unexpected end")
                yield name, content


class ZipArchive:
    """A zip archive of members that are stored or deflated."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        with read_errors(self.path):
            return sha256_of_file(self.path)

    def entries(self) -> Sequence[Entry]:
        return sorted_entries(Entry(name, member.is_dir()) for name, member in self._members.items())

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        members = {}
        with self._open() as archive:
            guard = _Guard(self.path)
            for member in archive.infolist():
                guard.admit(member.orig_filename, member.file_size, _fault_of_zip_member(member))
                members[_normal(member.filename)] = member
        return members

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        with _archive_errors(self.path), self.path.open("rb") as raw:
            file = _BoundedFile(raw, self.path)
            # The list of members, which zipfile reads at once; its objects take at most ten times as much memory.
            file.allow(max(2**20, int(SHARE_FOR_MEMBERS * memory_limit()) // 10))
            with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
                file.allow(None)
                yield archive

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | DataError]]:
        with self._open() as archive:
            for name in names:
                member = self._members[name]
                with archive.open(member) as file:
                    # Without a number, it would decompress everything before it is cut to the declared size.
                    yield name, file.read(member.file_size + 1)


@dataclass(frozen=True, slots=True)
class _TarMember:
    offset: int
    size: int
    is_directory: bool


class _BoundedFile:
    """A file that raises a `DataError` rather than read more than is allowed, or go beyond the archive's limit."""

    def __init__(self, file: IO[bytes], archive: Path) -> None:
        self.file, self.archive = file, archive
        self.max_position = max_unpacked_bytes(archive)
        self._allowed: int | None = 0
        self._left: int | None = 0

    def allow(self, num_bytes: int | None) -> None:
        """Set the number of bytes that may be read from now on; None: any number."""
        self._allowed = self._left = num_bytes

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size if self._left is None else _smaller(size, self._left + 1))
        if self._left is None:
            return content
        self._left -= len(content)
        if self._left < 0:
            raise _unsafe(f"a header is longer than {self._allowed} bytes", self.archive)
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and offset > self.max_position:
            raise _unsafe(f"it would unpack to more than {self.max_position} bytes", self.archive)
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True

    def check_end(self, offset: int) -> None:
        """Raise unless a tar archive ends at an offset: tarfile takes a damaged header for the end."""
        self.file.seek(offset)
        if self.file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("unexpected end")
        while self.file.read(2**20):  # gzip verifies its checksum only at the end
            self.seek(self.tell())


class _Guard:
    """Rejects archive members that could write outside the folder, follow a link, or fill the memory or the disk."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._max_bytes = max_unpacked_bytes(archive)
        self._max_members = max_members(archive)
        self._num_members = self._num_bytes = 0

    def admit(self, name: str, num_bytes: int, fault: str) -> None:
        """Raise a `DataError` unless a member is harmless; called before its content is read."""
        self._num_members += 1
        self._num_bytes += num_bytes
        max_file_bytes = image_sources.MAX_FILE_BYTES
        leads_outside = name.startswith("/") or ".." in PurePosixPath(name).parts or name[1:2] == ":"
        if leads_outside or "\\" in name or "\0" in name:
            fault = "a path that leads outside the archive"
        elif not 0 <= num_bytes <= max_file_bytes:
            fault = f"{num_bytes} bytes long, but at most {max_file_bytes} are allowed"
        elif self._num_bytes > self._max_bytes:
            fault = f"one too many: the archive would unpack to more than {self._max_bytes} bytes"
        elif self._num_members > self._max_members:
            fault = f"one too many: at most {self._max_members} are allowed in an archive of this size, on this machine"
        if fault:
            raise _unsafe(f"member {name!r} is {fault}", self._archive)


def _smaller(size: int, limit: int) -> int:
    return limit if size < 0 else min(size, limit)


def max_unpacked_bytes(archive: Path) -> int:
    """Return to how many bytes an archive may unpack."""
    return max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * archive.stat().st_size)


def max_members(archive: Path) -> int:
    """Return how many members an archive may have, by its size and by the memory of this machine."""
    by_size = max(ALWAYS_ALLOWED_MEMBERS, archive.stat().st_size // MIN_BYTES_PER_MEMBER)
    return min(by_size, int(SHARE_FOR_MEMBERS * memory_limit()) // MEMORY_PER_MEMBER)


def _fault_of_tar_member(member: tarfile.TarInfo) -> str:
    if member.issparse():
        return "a sparse file"
    return "" if member.isreg() or member.isdir() else "a link or a device"


def _fault_of_zip_member(member: zipfile.ZipInfo) -> str:
    if member.flag_bits & 1:
        return "encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "neither stored nor deflated"
    kind = stat.S_IFMT(member.external_attr >> 16)
    return "" if kind in (0, stat.S_IFREG, stat.S_IFDIR) else "a link or a device"


def _unsafe(what: str, archive: Path) -> DataError:
    return DataError(f"unsafe archive: {what}", str(archive), "create an archive of plain files and folders")


@contextmanager
def _archive_errors(archive: Path) -> Iterator[None]:
    damage = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError)
    # tarfile raises ValueError and RecursionError for crafted headers, zipfile OverflowError and struct.error
    try:
        yield
    except (*damage, ValueError, RecursionError, OverflowError, struct.error) as error:
        raise DataError(
            f"archive is truncated or damaged: {error}", str(archive), "create or download it again"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror or error}", str(archive), "make it readable") from error


def _normal(name: str) -> str:
    return str(PurePosixPath(name))
