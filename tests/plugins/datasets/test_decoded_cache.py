"""A cache file is whole and as it was written, or it does not count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ensemblekit_datasets.decoded_cache import cache_key, read_cache, write_cache

TENSORS = {"images": torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2), "targets": torch.tensor([0, 1, 1, 0])}
NOTES = {"classes": ["cat", "dög"], "shape": [3, 2, 2]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "cached.safetensors"


def test_what_was_written_is_read_back(path: Path) -> None:
    write_cache(path, TENSORS, NOTES)
    found = read_cache(path)
    assert found is not None
    tensors, notes = found
    assert notes == NOTES
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_not_there_is_not_found(path: Path) -> None:
    assert read_cache(path) is None


def test_no_flipped_bit_goes_unnoticed(path: Path) -> None:
    write_cache(path, TENSORS, NOTES)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        found = read_cache(path)
        # Padding of the header is spaces, and a flip there may be another blank: then nothing is lost.
        if found is not None:
            assert found[1] == NOTES
            assert all(torch.equal(found[0][name], TENSORS[name]) for name in TENSORS)
            assert whole[position : position + 1].isspace()


def test_no_cut_goes_unnoticed(path: Path) -> None:
    write_cache(path, TENSORS, NOTES)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_cache(path) is None


def test_a_write_that_dies_half_way_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(path, TENSORS, NOTES)

    def power_cut(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(KeyboardInterrupt):
        write_cache(path, {"images": torch.zeros(1)}, {})
    found = read_cache(path)
    assert found is not None
    assert found[1] == NOTES
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="set ENSEMBLEKIT_DATA"):
        write_cache(tmp_path / "file" / "cached.safetensors", TENSORS, NOTES)


def test_a_full_disk_is_a_warning_and_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        write_cache(path, TENSORS, NOTES)
    assert list(path.parent.iterdir()) == []


def test_keys_of_different_parts_differ() -> None:
    assert len({cache_key("a", "bc"), cache_key("ab", "c"), cache_key("abc"), cache_key("a", "b", "c")}) == 4
    assert cache_key("a", 1) == cache_key("a", 1)
