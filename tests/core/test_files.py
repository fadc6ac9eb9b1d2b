"""A file or a directory appears complete or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ensemblekit import atomic_write, sha256_of_file


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_appears_when_the_block_ends_and_missing_parents_are_created(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file.txt"
    with atomic_write(target) as staged:
        staged.write_text("new")
        assert not target.exists()
        assert staged.name == target.name
    assert target.read_text() == "new"
    assert names_in(tmp_path) == ["new", "new/folder", "new/folder/file.txt"]


def test_a_directory_appears_with_everything_in_it(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "images") as staged:
        (staged / "cat").mkdir(parents=True)
        (staged / "cat" / "0.png").write_bytes(b"x")
        assert not (tmp_path / "images").exists()
    assert names_in(tmp_path) == ["images", "images/cat", "images/cat/0.png"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(error: type[BaseException], tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")

    def write_half() -> None:
        with atomic_write(target) as staged:
            staged.write_text("half of the n")
            raise error

    with pytest.raises(error):
        write_half()
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["file.txt"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), atomic_write(target) as staged:
        staged.write_text("new")
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["file.txt"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "file.txt"):
        pass
    assert names_in(tmp_path) == []


def test_the_checksum_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content" * 1000)
    assert sha256_of_file(tmp_path / "file") == hashlib.sha256(b"content" * 1000).hexdigest()
