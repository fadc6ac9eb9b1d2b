"""The command cache: it shows what is there and where it is from, and removes only what is ensemblekit's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ensemblekit_datasets.cifar import CIFAR10
from ensemblekit_datasets.image_folder import ImageFolder
from helpers.commands import last_error, run
from helpers.image_files import as_folder, as_zip, encoded, pixels, two_classes

from ensemblekit.data.cache import UNFINISHED_AFTER


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sources(directory: Path, tmp_path: Path) -> dict[str, Path]:
    """A folder whose decoded images are cached, an archive that was unpacked, a download and files of others."""
    files = two_classes(encoded(pixels(0)), 3)
    folder, archive = as_folder(tmp_path / "photos", files), as_zip(tmp_path / "photos.zip", files)
    ImageFolder(path=folder).load(0)
    ImageFolder(path=archive, storage="stream").load(0)
    download = CIFAR10().places()[1]
    download.write_bytes(bytes(5000))
    (directory / "mine.txt").write_text("a user's file")
    (directory / "decoded" / "mine.safetensors").write_text("a user's file")
    (directory / "unpacked" / "mine").mkdir()
    return {"folder": folder, "archive": archive, "download": download}


def listed() -> list[dict[str, object]]:
    result = run("cache", "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)["entries"]


def of_users(directory: Path) -> bool:
    mine = [directory / "mine.txt", directory / "decoded" / "mine.safetensors", directory / "unpacked" / "mine"]
    return all(path.exists() for path in mine)


def test_an_empty_cache_is_said(directory: Path) -> None:
    result = run("cache")
    assert result.exit_code == 0
    assert result.stdout == f"0 bytes in {directory}\n"
    assert run("cache", "clear").stdout == f"freed 0 bytes in {directory}\n"


def test_every_entry_knows_its_kind_size_source_and_last_use(sources, directory) -> None:
    entries = listed()
    assert [entry["kind"] for entry in entries] == ["decoded"] * 3 + ["unpacked", "download"]
    archive = str(sources["archive"])
    assert sorted(entry["source"] for entry in entries[:3]) == sorted([str(sources["folder"]), archive, archive])
    assert entries[3]["source"] == archive
    assert entries[4]["source"] == "cifar10"
    assert entries[4]["bytes"] == 5000
    for entry in entries:
        assert Path(entry["path"]).exists()
        assert entry["last_used"].endswith("+00:00")
    shown = run("cache").stdout
    assert str(sources["folder"]) in shown
    assert "4.9 KiB" in shown
    assert f" in {directory}" in shown


def test_a_load_counts_as_a_use(sources) -> None:
    for entry in listed():
        os.utime(entry["path"], (0, 0))
    ImageFolder(path=sources["folder"]).load(0)
    ImageFolder(path=sources["archive"], storage="stream").load(0)
    assert [entry["last_used"] > "2000" for entry in listed()] == [True, True, True, True, False]


def test_clear_keeps_downloads_and_what_is_not_ours(sources, directory) -> None:
    before = sum(entry["bytes"] for entry in listed() if entry["kind"] != "download")
    result = run("cache", "clear", "--json")
    assert json.loads(result.stdout)["freed_bytes"] == before
    assert [entry["kind"] for entry in listed()] == ["download"]
    assert of_users(directory)
    assert ImageFolder(path=sources["folder"]).load(0).train[0].shape == (6, 3, 6, 5)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--decoded"], ["unpacked", "download"]),
        (["--unpacked"], ["decoded", "decoded", "decoded", "download"]),
        (["--downloads"], ["decoded", "decoded", "decoded", "unpacked"]),
        (["--decoded", "--unpacked"], ["download"]),
        (["--all"], []),
    ],
)
def test_clear_removes_what_was_chosen(options, left, sources, directory) -> None:
    result = run("cache", "clear", *options)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("freed ")
    assert [entry["kind"] for entry in listed()] == left
    assert of_users(directory)
    assert not list(directory.rglob(".writing-*"))


def test_links_are_neither_followed_nor_removed(sources, directory, tmp_path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub" / "precious").write_text("!")
    name = "a" * 64
    (directory / "unpacked" / name).symlink_to(outside)
    (directory / "decoded" / f"{name}.safetensors").symlink_to(outside / "sub" / "precious")
    CIFAR10().places()[0].symlink_to(outside)
    [unpacked] = [entry for entry in listed() if entry["kind"] == "unpacked"]
    (Path(unpacked["path"]) / "link").symlink_to(outside)
    assert run("cache", "clear", "--all").exit_code == 0
    assert (outside / "sub" / "precious").read_text() == "!"
    assert (directory / "unpacked" / name).is_symlink()


def test_a_linked_subdirectory_is_left_alone(sources, directory, tmp_path) -> None:
    (directory / "decoded").rename(tmp_path / "elsewhere")
    (directory / "decoded").symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").iterdir())
    assert run("cache", "clear", "--all").exit_code == 0
    assert sorted((tmp_path / "elsewhere").iterdir()) == before


def test_what_a_killed_process_left_is_cleared_but_not_what_is_being_written(directory) -> None:
    old, new = (directory / "decoded" / f".writing-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(100))
    past = time.time() - UNFINISHED_AFTER - 60
    for path in (old / "file", old):
        os.utime(path, (past, past))
    assert [entry["path"] for entry in listed()] == [str(old)]
    run("cache", "clear")
    assert not old.exists()
    assert (new / "file").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:20], lambda data: b"?" * 99, lambda data: b""])
def test_damaged_copies_are_listed_and_cleared(damage: Callable[[bytes], bytes], sources) -> None:
    for entry in listed():
        path = Path(entry["path"])
        file = path / ".ensemblekit.json" if path.is_dir() else path
        file.write_bytes(damage(file.read_bytes()))
    assert [entry["source"] for entry in listed()] == [None, None, None, None, "cifar10"]
    assert "unknown" in run("cache").stdout
    run("cache", "clear", "--all")
    assert listed() == []


def test_skipped_images_are_listed(directory, tmp_path) -> None:
    files = two_classes(encoded(pixels(0)), 3) | {"train/a/1.png": b"?"}
    ImageFolder(path=as_folder(tmp_path / "photos", files), on_bad="skip").load(0)
    [entry] = listed()
    assert entry["skipped"] == {"train/a/1.png": "cannot decode image"}


def test_an_entry_that_cannot_be_removed_is_an_error(sources, monkeypatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ensemblekit.data.cache._remove", refuse)
    result = run("cache", "clear")
    assert result.exit_code == 3
    assert last_error(result).startswith("error: cannot be removed: Permission denied; ")


def test_a_cleared_archive_is_unpacked_again(sources) -> None:
    before = ImageFolder(path=sources["archive"], storage="stream").load(0).train
    images = torch.stack([image for image, _ in before])
    run("cache", "clear", "--unpacked")
    after = ImageFolder(path=sources["archive"], storage="stream").load(0).train
    assert torch.equal(torch.stack([image for image, _ in after]), images)
