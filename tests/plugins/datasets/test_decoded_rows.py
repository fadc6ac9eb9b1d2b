"""Streamed images are read from decoded copies on disk, which are complete and undamaged, or not used."""

from __future__ import annotations

from pathlib import Path

import ensemblekit_datasets.folder_loading as folder_loading
import numpy as np
import pytest
import torch
from ensemblekit_datasets import decoded_rows
from ensemblekit_datasets.decoded_rows import RowWriter, room_on_disk
from ensemblekit_datasets.image_folder import ImageFolder
from ensemblekit_datasets.streamed_images import StreamedImages
from helpers.image_files import as_folder, encoded, pixels
from safetensors.torch import load_file

import ensemblekit as ek


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of five different images each; the third of the first class is not an image."""
    names = [f"{label}/{index}.png" for label in "ab" for index in range(5)]
    files = {name: encoded(pixels(number)) for number, name in enumerate(names)}
    return as_folder(tmp_path / "photos", files | {"a/2.png": b"?"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def streamed(folder: Path) -> StreamedImages:
    train = ImageFolder(path=folder, storage="stream", on_bad="skip").load(0).train
    assert isinstance(train, StreamedImages)
    return train


def in_memory(folder: Path) -> torch.Tensor:
    return ImageFolder(path=folder, storage="memory", on_bad="skip").load(0).train[0]


def copies(cache: Path) -> list[Path]:
    return list((cache / "decoded").glob("*-rows.safetensors"))


def test_copies_have_the_pixels_of_the_files_in_any_order(folder, cache, monkeypatch):
    expected = in_memory(folder)
    for _ in range(2):  # written, then found in the cache
        train = streamed(folder)
        with monkeypatch.context() as patch:
            patch.setattr(StreamedImages, "_decode", lambda *_: pytest.fail("decoded again"))
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1)).tolist()
            images, targets = train.read_batch(order)
        assert torch.equal(images, expected[order])
        assert torch.equal(targets, train.targets[order])
    [file] = copies(cache)
    assert load_file(file)["images"].shape == (9, 3, 6, 5)  # any reader of safetensors takes it


def test_a_damaged_row_is_decoded_from_its_file(folder, cache):
    expected, train = in_memory(folder), streamed(folder)
    [file] = copies(cache)
    content = bytearray(file.read_bytes())
    for row in range(9):
        content[-1 - row * 90] ^= 1 << row % 8
    file.write_bytes(content)
    assert torch.equal(train.read_batch(range(len(train)))[0], expected)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:400])])
def test_copies_that_vanish_or_shrink_are_done_without_and_made_again(damage, folder, cache):
    expected, train = in_memory(folder), streamed(folder)
    [file] = copies(cache)
    whole = file.read_bytes()
    damage(file)
    assert torch.equal(train.read_batch(range(len(train)))[0], expected)
    assert streamed(folder).copy is not None
    assert copies(cache)[0].read_bytes() == whole


def test_without_room_each_epoch_decodes_the_files(folder, cache, monkeypatch):
    monkeypatch.setattr(folder_loading, "room_on_disk", lambda path: 0)
    for _ in range(2):
        train = streamed(folder)
        assert train.copy is None
        assert torch.equal(train.read_batch(range(len(train)))[0], in_memory(folder))
    assert not copies(cache)
    monkeypatch.undo()
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(cache))
    assert streamed(folder).copy is not None  # there is room again


def test_as_many_copies_are_kept_as_there_is_room_for(folder, cache, monkeypatch):
    expected = in_memory(folder)
    decoded: list[int] = []
    original = StreamedImages._decode
    with monkeypatch.context() as patch:
        patch.setattr(StreamedImages, "_decode", lambda *given: decoded.append(given[1]) or original(*given))
        patch.setattr(folder_loading, "room_on_disk", lambda path: 5 * 90 - 1)
        for _ in range(2):  # written, then found in the cache
            splits = ImageFolder(path=folder, storage="stream", on_bad="skip").load(0)
            decoded.clear()
            for images in (splits.train, splits.test):
                images.read_batch(range(len(images)))
            assert len(decoded) == 9 - 4
            assert torch.equal(splits.train.read_batch(range(len(expected)))[0], expected)
            patch.setattr(folder_loading, "decode_all", lambda *_: pytest.fail("decoded again"))
    assert bool((streamed(folder).copy.rows >= 0).all())  # there is room for all


def test_a_disk_that_is_full_is_a_warning(folder, cache, monkeypatch):
    class Full:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __enter__(self) -> Path:
            return Path("/dev/full")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(decoded_rows, "atomic_write", Full)
    with pytest.warns(RuntimeWarning, match=r"not kept in .*No space left on device.*each epoch decodes them again"):
        train = streamed(folder)
    assert train.copy is None
    assert torch.equal(train.read_batch([1, 0])[0], in_memory(folder)[[1, 0]])


def test_an_error_leaves_nothing_behind(tmp_path):
    def write() -> None:
        with RowWriter(tmp_path / "rows.safetensors", (3, 6, 5), 4, "photos") as writer:
            writer.add(np.zeros((3, 6, 5), np.uint8))
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert not list(tmp_path.iterdir())


def test_a_quarter_of_the_free_space_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(decoded_rows.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 400}))
    assert room_on_disk(tmp_path / "not" / "there") == 100
    monkeypatch.setattr(decoded_rows.os, "access", lambda path, mode: False)
    assert room_on_disk(tmp_path) == 0


def test_training_is_the_same_with_copies_and_without(folder, cache, monkeypatch):
    dataset = ImageFolder(path=folder, storage="stream", on_bad="skip", augment=["flip"], normalise=True)
    with_copies = ek.load_data(dataset, 0)
    monkeypatch.setattr(folder_loading, "room_on_disk", lambda path: 0)
    for file in copies(cache):
        file.unlink()
    without = ek.load_data(dataset, 0)
    assert with_copies.fingerprint == without.fingerprint
    pairs = zip(with_copies.train.training_batches(2, 0, 1), without.train.training_batches(2, 0, 1), strict=True)
    assert all(torch.equal(one.inputs, other.inputs) for one, other in pairs)
