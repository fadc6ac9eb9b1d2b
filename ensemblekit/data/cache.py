"""The cache directory: decoded copies of images, unpacked archives and downloads. What is in it, and how to clear it.

A data set keeps decoded copies as ``decoded/<64 hexadecimal digits>.safetensors`` and unpacked archives as
``unpacked/<64 hexadecimal digits>/``. Each knows its source: in the metadata of the file, and in a file in the folder.
Links are never followed, and nothing else in the directory is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from ensemblekit.core.errors import DataError

Kind = Literal["decoded", "unpacked", "unfinished", "download"]
DECODED_NAME = re.compile(r"[0-9a-f]{64}(-index|-rows)?\.safetensors")
UNPACKED_NAME = re.compile(r"[0-9a-f]{64}")
UNPACKED_NOTE = ".ensemblekit.json"
"""File in the folder of an unpacked archive that says which one it is from."""
UNFINISHED_PREFIX = ".writing-"
"""How `ensemblekit.atomic_write` names what it has not finished."""
UNFINISHED_AFTER = 24 * 3600.0
"""Seconds without a change after which something unfinished was left behind by a process that was killed."""


def cache_directory() -> Path:
    """Return the directory of downloads and decoded images: $ENSEMBLEKIT_DATA, else the user's cache directory."""
    if chosen := os.environ.get("ENSEMBLEKIT_DATA"):
        return Path(os.path.expanduser(chosen))
    # os.path.expanduser keeps "~" if there is no home directory; Path.expanduser raises.
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "ensemblekit"


@dataclass(frozen=True)
class CacheEntry:
    """A file or a folder in the cache directory."""

    kind: Kind
    path: Path
    num_bytes: int
    last_used: float
    """Seconds since 1970."""
    source: str | None
    """Path of the images it was made from, or name of the data set; None if that is not known."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Images that were skipped because they cannot be used, with the reasons."""


def cache_entries(directory: Path, downloads: Mapping[Path, str]) -> list[CacheEntry]:
    """List what is in a cache directory, the largest of each kind first.

    Args:
        directory: The cache directory; need not exist.
        downloads: Paths where data sets look for their files, with the name of the data set; those in the directory
            are listed if they exist.

    Raises:
        DataError: The directory cannot be read.
    """
    try:
        entries = [*_decoded(directory), *_unpacked(directory), *_unfinished(directory)]
        entries += _downloads(directory, downloads)
    except OSError as error:
        raise DataError(
            f"cannot read: {error.strerror}", str(error.filename or directory), "make it readable"
        ) from error
    kinds = ["decoded", "unpacked", "unfinished", "download"]
    return sorted(entries, key=lambda entry: (kinds.index(entry.kind), -entry.num_bytes, str(entry.path)))


def clear_entries(entries: Iterable[CacheEntry], kinds: Collection[Kind]) -> Iterator[CacheEntry]:
    """Remove the entries of some kinds; yields each when it is gone.

    Raises:
        DataError: An entry cannot be removed.
    """
    for entry in entries:
        if entry.kind not in kinds:
            continue
        try:
            _remove(entry.path)
        except FileNotFoundError:  # by another process
            continue
        except OSError as error:
            what = f"cannot be removed: {error.strerror}"
            raise DataError(what, str(error.filename or entry.path), "check its permissions") from error
        yield entry


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink()
        return
    # Renamed first: whoever looks for the folder finds all of it or nothing.
    trash = Path(mkdtemp(prefix=UNFINISHED_PREFIX, dir=path.parent))
    try:
        path.rename(trash / path.name)
    finally:
        shutil.rmtree(trash)  # which follows no links


def _decoded(directory: Path) -> Iterator[CacheEntry]:
    for item in _scan(directory / "decoded"):
        if DECODED_NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False):
            status, notes = item.stat(follow_symlinks=False), _notes(Path(item.path))
            skipped = notes.get("skipped")
            yield CacheEntry(
                kind="decoded",
                path=Path(item.path),
                num_bytes=status.st_size,
                last_used=status.st_mtime,
                source=_text(notes.get("source")),
                skipped=skipped if isinstance(skipped, dict) else {},
            )


def _unpacked(directory: Path) -> Iterator[CacheEntry]:
    for item in _scan(directory / "unpacked"):
        if UNPACKED_NAME.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
            path = Path(item.path)
            source = _text(_json(path / UNPACKED_NOTE).get("source"))
            last_used = item.stat(follow_symlinks=False).st_mtime
            yield CacheEntry("unpacked", path, _num_bytes(path), last_used, source)


def _unfinished(directory: Path) -> Iterator[CacheEntry]:
    """What processes that were killed have left behind; what is being written now is left alone."""
    for folder in (directory, directory / "decoded", directory / "unpacked"):
        for item in _scan(folder):
            if item.name.startswith(UNFINISHED_PREFIX) and item.is_dir(follow_symlinks=False):
                path = Path(item.path)
                last_used = max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
                if time.time() - last_used > UNFINISHED_AFTER:
                    yield CacheEntry("unfinished", path, _num_bytes(path), last_used, None)


def _downloads(directory: Path, downloads: Mapping[Path, str]) -> Iterator[CacheEntry]:
    for path, source in downloads.items():
        if directory in path.parents and path.exists() and not path.is_symlink():
            status = path.lstat()
            yield CacheEntry("download", path, _num_bytes(path), max(status.st_atime, status.st_mtime), source)


def _scan(folder: Path) -> Sequence[os.DirEntry[str]]:
    if folder.is_symlink() or not folder.is_dir():
        return ()
    with os.scandir(folder) as scan:
        return list(scan)


def _num_bytes(path: Path) -> int:
    status = path.lstat()
    return status.st_size if not path.is_dir() else sum(file.lstat().st_size for file in path.rglob("*"))


def _notes(file: Path) -> dict[str, Any]:
    """Return the metadata of a decoded copy; empty if it is damaged or of an older version."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return _parsed((opened.metadata() or {}).get("notes", ""))
    except (OSError, SafetensorError):
        return {}


def _json(file: Path) -> dict[str, Any]:
    try:
        return _parsed(file.read_text()) if not file.is_symlink() else {}
    except (OSError, UnicodeDecodeError):
        return {}


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
