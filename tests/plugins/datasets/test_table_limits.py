"""Tables that would exhaust the memory are refused by what they declare, with the limit in the error."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from ensemblekit_datasets import table_files
from ensemblekit_datasets.table import Table

from ensemblekit import DataError

MEBI = 2**20


def refused(path: Path) -> tuple[DataError, int]:
    """The error of a table, and the most memory that was used to find it."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as raised:
            Table(path=path, target="y").load(0)
        return raised.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_archive_that_unpacks_to_more_than_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "memory_limit", lambda: 40 * MEBI)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros(8 * MEBI, dtype=np.uint8), y=np.zeros(8 * MEBI, dtype=np.uint8))
    assert path.stat().st_size < MEBI
    error, used = refused(path)
    assert "its arrays take 0.266 GiB in memory" in error.what
    assert "0.0195 GiB in memory" in error.fix
    assert used < 4 * MEBI


def test_an_array_that_declares_more_than_it_has_is_not_allocated(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("y.npy", header.getvalue())
    error, used = refused(path)
    assert "too large for a table" in error.what
    assert used < 4 * MEBI


def test_a_million_columns_are_refused_from_the_header_alone(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join(map(str, range(10**6))) + "\n1\n")
    error, used = refused(path)
    assert "line 1 has more than 100,000 fields" in error.what
    assert "100,000 columns" in error.fix
    assert used < 64 * MEBI


def test_a_million_columns_of_an_array_are_refused(tmp_path):
    path = tmp_path / "wide.npz"
    np.savez(path, x=np.zeros((2, 10**6), dtype=np.uint8), y=np.arange(2))
    error, used = refused(path)
    assert "it has 1,000,001 columns" in error.what
    assert used < 4 * MEBI


def test_an_endless_line_is_read_up_to_the_limit_only(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "MAX_LINE", 2**16)
    path = tmp_path / "line.csv"
    path.write_text("x,y\n" + "1" * 20 * MEBI)
    error, used = refused(path)
    assert "line 2 has more than 65,536 characters" in error.what
    assert used < 4 * MEBI


def test_an_enormous_field_is_refused_with_the_limit(tmp_path):
    path = tmp_path / "field.csv"
    path.write_text("x,y\n" + "1" * 200_000 + ",a\n2,b\n")
    assert "field larger than field limit (131072)" in refused(path)[0].what


def test_rows_that_do_not_fit_in_memory_are_refused_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "memory_limit", lambda: 4 * MEBI)
    path = tmp_path / "long.csv"
    path.write_text("x,y\n" + "1,2\n" * 100_000)
    error, used = refused(path)
    assert "lines take 0.00195 GiB in memory" in error.what
    assert used < 16 * MEBI


@pytest.mark.parametrize("damage", ["encrypted", "cut"])
def test_a_damaged_archive_is_reported(tmp_path, damage):
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, y=np.arange(1000))
    content = bytearray(path.read_bytes())
    if damage == "encrypted":
        content[6] |= 1
        content[content.rfind(b"PK\x01\x02") + 8] |= 1
    else:
        content[200:260] = bytes(60)
    path.write_bytes(content)
    assert "not an NPZ file of numbers and text" in refused(path)[0].what
