"""Files of tensors: written here part by part, and equal to those of the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ensemblekit as ek
from ensemblekit.core import tensors as groups
from ensemblekit.runs.tensor_files import read_tensors, write_tensors

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "learned": torch.nn.Parameter(torch.tensor(0.5)),
    "nothing": torch.zeros(0, 4),
    'a "name" \\ é': torch.tensor([1.5]),
    "count": torch.tensor(3),
    "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "float64": torch.tensor([1.0], dtype=torch.float64),
    "bytes": torch.tensor([1, 2, 255], dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("group_bytes", [1, 30, 2**22])
def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path, monkeypatch, group_bytes):
    monkeypatch.setattr(groups, "GROUP_BYTES", group_bytes)
    sha256 = write_tensors(tmp_path / "ours", TENSORS)
    save_file({name: value.detach().contiguous() for name, value in TENSORS.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sha256 == ek.sha256_of_file(tmp_path / "ours")


def test_tensors_that_share_memory_are_written_each_by_itself(tmp_path: Path):
    whole = torch.arange(8.0)
    write_tensors(tmp_path / "file", {"first": whole[:4], "all": whole, "again": whole})
    found = read_tensors(tmp_path / "file")
    assert {name: value.tolist() for name, value in found.items()} == {
        "first": whole[:4].tolist(),
        "all": whole.tolist(),
        "again": whole.tolist(),
    }


def test_a_file_without_tensors_can_be_read(tmp_path: Path):
    write_tensors(tmp_path / "file", {})
    assert load_file(tmp_path / "file") == {}
