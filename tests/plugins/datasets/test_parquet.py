"""Parquet files give the samples of the same table in CSV, by their types; damaged and enormous ones are refused."""

from __future__ import annotations

import datetime
import decimal
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ensemblekit_datasets import parquet_files, table_files
from ensemblekit_datasets.table import Table

from ensemblekit import DataError

NUM_ROWS = 40
DAY = datetime.date(2024, 3, 1)


def cells() -> dict[str, list[Any]]:
    """The same values in every format; text is never a number, since only CSV would take it for one."""
    random = np.random.default_rng(0)
    return {
        "size": [None if i % 7 == 3 else round(float(x), 4) for i, x in enumerate(random.normal(50, 10, NUM_ROWS))],
        "count": [None if i % 5 == 1 else i % 3 for i in range(NUM_ROWS)],
        "price": [decimal.Decimal(i) / 4 for i in range(NUM_ROWS)],
        "colour": [None if i % 6 == 2 else ("red", "green", "blue")[i % 3] for i in range(NUM_ROWS)],
        "shop": [("north", "south")[i % 2] for i in range(NUM_ROWS)],
        "label": [("no", "yes")[i // 3 % 2] for i in range(NUM_ROWS)],
    }


TYPES = {"price": pa.decimal128(10, 2), "shop": pa.dictionary(pa.int8(), pa.string()), "count": pa.int16()}


def write(path: Path, columns: dict[str, Any], types: dict[str, Any] | None = None, **options: Any) -> Path:
    arrays = {name: pa.array(values, type=(types or {}).get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path, **options)
    return path


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    lines = [
        ",".join("" if value is None else str(value) for value in row) for row in zip(*cells().values(), strict=True)
    ]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([",".join(cells()), *lines]))
    return path


@pytest.mark.parametrize("options", [{}, {"row_group_size": 7}, {"compression": "gzip", "use_dictionary": False}])
def test_a_parquet_file_gives_the_samples_of_the_same_csv_file(tmp_path, csv_file, options):
    path = write(tmp_path / "rows.parquet", cells(), TYPES, **options)
    ours, theirs = (Table(path=file, target="label").load(3) for file in (path, csv_file))
    for split in ("train", "validation", "test"):
        for mine, other in zip(getattr(ours, split), getattr(theirs, split), strict=True):
            assert torch.equal(mine, other)
    assert ours.preparation == theirs.preparation
    assert ours.info.categories == ((3, 4), (7, 2))


def test_new_rows_may_come_in_any_format(tmp_path, csv_file):
    path = write(tmp_path / "rows.pq", cells(), TYPES)
    for trained_on in (path, csv_file):
        table = Table(path=trained_on, target="label")
        preparation = table.load(0).preparation
        from_parquet, from_csv = (table.prepare(file, preparation) for file in (path, csv_file))
        assert torch.equal(from_parquet.inputs, from_csv.inputs)
        assert torch.equal(from_parquet.targets, from_csv.targets)


def test_types_decide_what_a_column_is(tmp_path):
    count = 30
    columns = {
        "zip": [f"0{i % 4}123" for i in range(count)],
        "code": pandas.Categorical([i % 3 for i in range(count)]),
        "flag": [i % 2 == 0 for i in range(count)],
        "gap": [None] * count,
        "y": [f"{i % 2}" for i in range(count)],
    }
    path = tmp_path / "rows.parquet"
    pandas.DataFrame(columns).to_parquet(path)
    table = Table(path=path, target="y")
    splits = table.load(0)
    kinds = {column["name"]: column["kind"] for column in splits.preparation["columns"]}
    assert kinds == {"zip": "category", "code": "category", "flag": "number", "gap": "category", "y": "category"}
    assert splits.classes == ("0", "1")
    new = tmp_path / "new.csv"
    new.write_text("zip,code,flag,gap\n00123,1,True,\n01123,1,false,\n")
    expected = table.prepare(path, splits.preparation).inputs[[4, 1]]
    assert torch.equal(table.prepare(new, splits.preparation).inputs, expected)


DATES = {
    "day": pa.array([DAY] * 8),
    "moment": pa.array([datetime.datetime(2024, 3, 1, 12, 30, 0, 5)] * 8, pa.timestamp("ns", "Europe/Berlin")),
    "time": pa.array([datetime.time(12, 30)] * 8),
    "wait": pa.array([datetime.timedelta(hours=3)] * 8),
}
ROWS = {"x": [float(i) for i in range(8)], "y": ["a", "b"] * 4}


def test_dates_are_refused_with_advice_and_taken_as_categories_if_asked(tmp_path):
    path = write(tmp_path / "rows.parquet", {**ROWS, **DATES})
    with pytest.raises(DataError) as raised:
        Table(path=path, target="y", max_categories=50).load(0)
    for name in DATES:
        assert f'"{name}" (dates or times, 1 value)' in raised.value.what
    assert raised.value.fix.startswith("derive numbers from dates, such as year, month, weekday or days since a start")
    assert 'data.ignore = ["day", "moment", "time", "wait"]' in raised.value.fix
    declared = Table(path=path, target="y", columns=dict.fromkeys(DATES, "category"))
    assert declared.load(0).info.input_shape == (5,)
    with pytest.raises(DataError, match="classes or numbers to predict, got dates or times"):
        Table(path=path, target="day").load(0)


def test_nested_columns_are_refused_unless_they_are_ignored(tmp_path):
    nested = {"parts": [[1, 2]] * 8, "box": [{"width": 1}] * 8, "raw": [b"x"] * 8}
    path = write(tmp_path / "rows.parquet", {**ROWS, **nested})
    with pytest.raises(DataError, match=r'(?s)got list<.*int64>.*rows.parquet, column "parts"'):
        Table(path=path, target="y").load(0)
    table = Table(path=path, target="y", ignore=tuple(nested))
    preparation = table.load(0).preparation
    assert table.prepare(path, preparation).inputs.shape == (8, 1)  # nor does it matter in new files


def test_the_unnamed_index_of_pandas_is_no_column(tmp_path):
    path = write(tmp_path / "rows.parquet", {**ROWS, "__index_level_0__": list(range(8))})
    assert Table(path=path, target="y").load(0).info.input_shape == (1,)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.parquet", ROWS)
    find = importlib.util.find_spec
    monkeypatch.setattr(parquet_files, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    with pytest.raises(DataError) as raised:
        Table(path=path, target="y").load(0)
    assert "pip install 'ensemblekit[parquet]'" in raised.value.fix


def test_damaged_files_and_files_without_rows_are_refused(tmp_path):
    path = write(tmp_path / "rows.parquet", cells(), TYPES)
    content = path.read_bytes()
    damaged = [content[: len(content) * share // 20] for share in range(20)]
    random = np.random.default_rng(1)
    for position in random.integers(0, len(content), 60):
        damaged.append(bytes([*content[:position], content[position] ^ 0x55, *content[position + 1 :]]))
    places = []
    for text in damaged:
        path.write_bytes(text)
        try:
            Table(path=path, target="label").load(0)  # a changed value may still be a value
        except DataError as error:
            places.append(error.where)
    assert len(places) >= 20
    assert all(where.startswith(str(path)) for where in places)
    with pytest.raises(DataError, match="expected at least one row, got none"):
        Table(path=write(path, {"x": [], "y": []}), target="y").load(0)
    with pytest.raises(DataError, match=r"(?s)cannot be read: No such file.*nowhere.parquet"):
        Table(path=tmp_path / "nowhere.parquet", target="y").load(0)


def test_tables_beyond_the_limits_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    many = 2_000_000
    path = write(tmp_path / "rows.parquet", {"x": np.zeros(many), "y": np.zeros(many, dtype=np.int8)})
    assert path.stat().st_size < 2**14
    monkeypatch.setattr(table_files, "memory_limit", lambda: 2**24)
    with pytest.raises(DataError) as raised:
        Table(path=path, target="y").load(0)
    assert "too large for a table: its 2,000,000 rows take" in raised.value.what
    assert "0.00781 GiB in memory" in raised.value.fix
    monkeypatch.setattr(table_files, "MAX_COLUMNS", 3)
    with pytest.raises(DataError, match="it has 4 columns"):
        Table(path=write(path, {**ROWS, "a": ROWS["x"], "b": ROWS["x"]}), target="y").load(0)


def test_text_that_decodes_to_more_than_it_takes_in_the_file_is_refused_on_the_way(tmp_path, monkeypatch):
    texts = [f"{'a' * 100_000}{i}" for i in range(400)]
    encoding = {"x": "DELTA_BYTE_ARRAY"}
    columns = {"x": texts, "y": ["a", "b"] * 200}
    path = write(tmp_path / "rows.parquet", columns, use_dictionary=False, column_encoding=encoding)
    assert path.stat().st_size < 2**18
    monkeypatch.setattr(table_files, "memory_limit", lambda: 2**24)
    monkeypatch.setattr(parquet_files, "ROWS_PER_BATCH", 16)
    with pytest.raises(DataError, match="too large for a table: its first rows take"):
        Table(path=path, target="y").load(0)
