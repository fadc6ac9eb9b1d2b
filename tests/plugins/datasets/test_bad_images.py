"""Images that cannot be used are all reported at once, or skipped and said; ignored files are counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ensemblekit_datasets import folder_loading
from ensemblekit_datasets.image_folder import ImageFolder
from helpers.commands import last_error, run
from helpers.image_files import WRITERS, Files, as_folder, as_tar, as_zip, encoded, pixels

from ensemblekit import DataError

every_form = pytest.mark.parametrize("form", list(WRITERS))
storages = pytest.mark.parametrize("storage", ["memory", "stream"])


@pytest.fixture
def files() -> Files:
    names = [f"{part}/{label}/{i:02d}.png" for part in ("train", "test") for label in ("cat", "dog") for i in range(20)]
    return {name: encoded(pixels(i)) for i, name in enumerate(names)}


def damaged(files: Files, *names: str) -> Files:
    return files | {name: files[name][:60] for name in names}


def error_of(path: Path, **parameters) -> DataError:
    with pytest.raises(DataError) as raised:
        ImageFolder(path=path, **parameters).load(0)
    assert raised.value.exit_code == 3
    return raised.value


@every_form
@storages
def test_all_bad_images_are_listed_at_once(form, storage, files, tmp_path) -> None:
    bad = [f"train/cat/{i:02d}.png" for i in range(15)] + [f"test/dog/{i:02d}.png" for i in range(15)]
    error = error_of(WRITERS[form](tmp_path / form, damaged(files, *bad)), storage=storage)
    assert error.what == "30 of 80 images cannot be used"
    assert 'data.on_bad = "skip"' in error.fix
    assert len(error.details) == 30
    assert all(any(name in line for line in error.details) for name in bad)
    assert error.first_details[20:] == ["… and 10 more"]


def test_images_that_cannot_be_read_or_have_another_size_are_listed_too(files, tmp_path) -> None:
    path = as_folder(
        tmp_path / "images", damaged(files, "test/cat/03.png") | {"test/cat/04.png": encoded(pixels(0, 9, 9, 3))}
    )
    (path / "train/dog/link.png").symlink_to("nowhere")
    os.mkfifo(path / "train/dog/pipe.png")
    error = error_of(path)
    assert [line.partition(";")[0] for line in sorted(error.details)] == [
        "cannot decode image",
        "cannot read: No such file or directory",
        "image sizes differ: expected 3×6×5 like the first, got 3×9×9",
        "not a regular file",
    ]
    assert error.fix.startswith("set data.size to resize all; replace or remove them")
    with pytest.raises(DataError, match="4 of 82 images cannot be used"):  # other sizes are never skipped
        ImageFolder(path=path, on_bad="skip").load(0)
    assert len(ImageFolder(path=path, size=4, on_bad="skip").load(0).train[0]) == 40


def test_one_file_too_large_is_not_read_into_memory(files, tmp_path, monkeypatch) -> None:
    path = as_folder(tmp_path / "images", files)
    (path / "test/cat/large.png").write_bytes(bytes(2**20))
    monkeypatch.setattr("ensemblekit_datasets.image_sources.MAX_FILE_BYTES", 2**20 - 1)
    assert "image file is larger than 0 MiB" in error_of(path).what


@every_form
@storages
def test_bad_images_are_skipped_if_that_is_wanted(form, storage, files, tmp_path, monkeypatch) -> None:
    bad = ("train/cat/00.png", "train/dog/07.png", "test/dog/19.png")
    path = WRITERS[form](tmp_path / form, damaged(files, *bad))
    good = {name: data for name, data in files.items() if name not in bad}
    wanted = ImageFolder(path=as_folder(tmp_path / "good", good)).load(0)
    for attempt in range(2):
        splits = ImageFolder(path=path, storage=storage, on_bad="skip").load(0)
        for split, expected in ((splits.train, wanted.train), (splits.test, wanted.test)):
            images = split[0] if storage == "memory" else torch.stack([image for image, _ in split])
            targets = split[1] if storage == "memory" else split.targets
            assert torch.equal(images, expected[0])
            assert torch.equal(targets, expected[1])
        [(label, text)] = splits.notes
        assert label == "skipped images"
        assert text.startswith("3 of 80 cannot be decoded: ")
        assert all(name in text for name in bad)
        if attempt == 0:
            monkeypatch.setattr(folder_loading, "decode_all", None)  # the second time it is known from the cache
    # The cache of a load that skipped images is not an excuse for one that must not.
    assert error_of(path, storage=storage).what == "3 of 80 images cannot be used"


def test_a_class_of_which_nothing_is_left_is_an_error(files, tmp_path) -> None:
    bad = [name for name in files if name.startswith("test/dog")]
    error = error_of(as_folder(tmp_path / "images", damaged(files, *bad)), on_bad="skip")
    assert error.what == "class 'dog' has no image left in test: all of them were skipped"


def test_nothing_but_bad_images_is_an_error_with_all_of_them(files, tmp_path) -> None:
    for on_bad in ("error", "skip"):
        error = error_of(as_tar(tmp_path / "images.tar", dict.fromkeys(files, b"?")), on_bad=on_bad)
        assert len(error.details) == 80


@every_form
def test_ignored_files_are_counted_by_reason(form, files, tmp_path) -> None:
    extras = ["notes.txt", "train/cat/a.gif", "train/cat/b.GIF", "train/cat/.hidden.png", "LICENSE", "extra/cat/0.png"]
    path = WRITERS[form](tmp_path / form, files | dict.fromkeys(extras, b"?"))
    for _ in range(2):  # found by reading, then in the cache
        [(label, text)] = ImageFolder(path=path).load(0).notes
        assert label == "ignored files"
        assert text == "6: 3 in no split, 2 .gif, 1 hidden"
    assert ImageFolder(path=as_folder(tmp_path / "good", files)).load(0).notes == ()


SPEC = """
[data]
name = "image_folder"
path = "{path}"
[model]
name = "mlp"
hidden = []
[ensemble]
members = 1
[training]
epochs = 1
"""


def test_the_plan_shows_what_was_skipped_and_the_error_what_is_bad(files, tmp_path) -> None:
    bad = [f"train/cat/{i:02d}.png" for i in range(4)]
    path = as_folder(tmp_path / "images", damaged(files, *bad))
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.format(path=path))
    failed = run("train", str(spec), "--out", str(tmp_path / "failed"))
    assert failed.exit_code == 3
    assert last_error(failed).startswith(f"error: 4 of 80 images cannot be used; {path}; ")
    assert all(name in failed.stderr for name in bad)
    trained = run("train", str(spec), "--out", str(tmp_path / "run"), "--set", "data.on_bad=skip")
    assert trained.exit_code == 0
    output = " ".join(trained.output.split())
    assert "skipped images 4 of 80 cannot be decoded" in output


# Odd names


def odd_names() -> list[str]:
    return ["café.png", os.fsdecode(b"caf\xe9.png"), "new\nline.png", "\x1b[31mred.png", "a" * 200 + ".png"]


@pytest.mark.parametrize("form", ["images", "images.tar", "images.tar.gz"])
@storages
def test_odd_file_names_are_read(form, storage, files, tmp_path) -> None:
    odd = {f"train/cat/{name}": encoded(pixels(i)) for i, name in enumerate(odd_names())}
    path = WRITERS[form](tmp_path / form, files | odd)
    for _ in range(2):
        train = ImageFolder(path=path, storage=storage).load(0).train
        assert len(train[1] if storage == "memory" else train.targets) == 45
    bad = WRITERS[form](tmp_path / f"bad-{form}", files | dict.fromkeys(odd, b"?"))
    error = error_of(bad, storage=storage)
    assert len(error.details) == 5
    assert len(ImageFolder(path=bad, storage=storage, on_bad="skip").load(0).notes) == 1


@pytest.mark.parametrize("form", ["images", "images.tar"])
def test_class_names_that_are_not_utf8_are_escaped(form, tmp_path) -> None:
    label = os.fsdecode(b"caf\xe9")
    files = {f"{name}/{i}.png": encoded(pixels(i)) for name in (label, "tea") for i in range(3)}
    splits = ImageFolder(path=WRITERS[form](tmp_path / form, files)).load(0)
    assert splits.classes == ("caf\\xe9", "tea")
    for name in splits.classes:
        name.encode()


def test_a_folder_whose_own_name_is_not_utf8_is_read(files, tmp_path) -> None:
    path = as_folder(tmp_path / os.fsdecode(b"caf\xe9"), files)
    for _ in range(2):
        assert len(ImageFolder(path=path).load(0).train[0]) == 40


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "~nobody-has-this-name/images", "\x1b[31mred"])
def test_a_path_that_cannot_exist_is_an_error(name, tmp_path) -> None:
    error = error_of(tmp_path / name if not name.startswith("~") else Path(name))
    assert error.what == "no such folder or archive"
    assert ImageFolder(path=tmp_path / name).found_at() is None


def test_names_in_an_archive_that_no_disk_can_hold_are_an_error(files, tmp_path) -> None:
    path = as_zip(tmp_path / "images.zip", files | {f"train/cat/{'x' * 300}.png": files["train/cat/00.png"]})
    error = error_of(path, storage="stream")
    assert "cannot unpack" in error.what
    assert "shorten long file names" in error.fix
    assert len(ImageFolder(path=path, storage="memory").load(0).train[0]) == 41
