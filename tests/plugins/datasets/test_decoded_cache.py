"""A cache file is complete and undamaged, or it is ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ensemblekit_datasets.decoded_cache import cache_key, read_cache, write_cache

TENSORS = {"images": torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2), "targets": torch.tensor([0, 1, 1, 0])}
METADATA = {"classes": ["cat", "dög"], "shape": [3, 2, 2]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "cached.safetensors"


def test_what_was_written_is_read_back(path: Path) -> None:
    write_cache(path, TENSORS, METADATA)
    cached = read_cache(path)
    assert cached is not None
    tensors, metadata = cached
    assert metadata == METADATA
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_missing_file_is_none(path: Path) -> None:
    assert read_cache(path) is None


def test_no_flipped_bit_goes_unnoticed(path: Path) -> None:
    write_cache(path, TENSORS, METADATA)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        cached = read_cache(path)
        # Padding of the header is spaces, and a flip there may be another blank: then nothing is lost.
        if cached is not None:
            assert cached[1] == METADATA
            assert all(torch.equal(cached[0][name], TENSORS[name]) for name in TENSORS)
            assert whole[position : position + 1].isspace()


def test_no_cut_goes_unnoticed(path: Path) -> None:
    write_cache(path, TENSORS, METADATA)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_cache(path) is None


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="set ENSEMBLEKIT_DATA"):
        write_cache(tmp_path / "file" / "cached.safetensors", TENSORS, METADATA)


def test_a_full_disk_is_a_warning_and_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        write_cache(path, TENSORS, METADATA)
    assert list(path.parent.iterdir()) == []


def test_keys_of_different_parts_differ() -> None:
    assert len({cache_key("a", "bc"), cache_key("ab", "c"), cache_key("abc"), cache_key("a", "b", "c")}) == 4
    assert cache_key("a", 1) == cache_key("a", 1)
