"""Frames of pandas and polars are tables: they give the samples of the same CSV file, by the types of their columns."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import polars
import pytest
import torch
from ensemblekit_datasets.frames import raw_frame
from ensemblekit_datasets.table import Table
from helpers.places import ROOT

from ensemblekit import DataError, Splits
from ensemblekit.data.arrays import frames_of

NUM_ROWS = 40
LIBRARIES: dict[str, Callable[[dict[str, Any]], Any]] = {"pandas": pandas.DataFrame, "polars": polars.DataFrame}


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], Any]:
    """Makes a frame of columns."""
    return LIBRARIES[request.param]


def cells() -> dict[str, list[Any]]:
    random = np.random.default_rng(0)
    return {
        "size": [None if i % 7 == 3 else round(float(x), 4) for i, x in enumerate(random.normal(50, 10, NUM_ROWS))],
        "colour": [None if i % 6 == 2 else ("red", "green", "blue")[i % 3] for i in range(NUM_ROWS)],
        "price": [i / 4 for i in range(NUM_ROWS)],
        "label": [("no", "yes")[i // 3 % 2] for i in range(NUM_ROWS)],
    }


def of_frames(*frames: Any, **parameters: Any) -> Table:
    taken = Table(target="label", **parameters).with_frames(frames)
    assert taken is not None
    return taken


def assert_equal(ours: Splits, theirs: Splits) -> None:
    for split in ("train", "validation", "test"):
        for mine, other in zip(getattr(ours, split), getattr(theirs, split), strict=True):
            assert torch.equal(mine, other)
    assert ours.preparation == theirs.preparation


def test_a_frame_gives_the_samples_of_the_same_csv_file(make, tmp_path):
    path = tmp_path / "rows.csv"
    pandas.DataFrame(cells()).to_csv(path, index=False)
    assert_equal(of_frames(make(cells())).load(3), Table(path=path, target="label").load(3))


def test_two_and_three_frames_are_the_splits(make):
    parts = [
        make({name: values[part] for name, values in cells().items()})
        for part in (slice(24), slice(24, 32), slice(32, 40))
    ]
    two, three = of_frames(parts[0], parts[2]).load(0), of_frames(*parts, validation_fraction=0.5).load(0)
    assert [len(targets) for _, targets in (three.train, three.validation, three.test)] == [24, 8, 8]
    assert len(two.train[1]) + len(two.validation[1]) == 24
    table = of_frames(*parts)
    prepared = table.prepare_frame(parts[2], three.preparation)
    assert torch.equal(prepared.inputs, three.test[0])
    assert torch.equal(prepared.targets, three.test[1])


INTEGERS = [None if i % 3 == 0 else i % 4 for i in range(NUM_ROWS)]
TEXTS = [None if i % 3 == 0 else f"0{i % 4}" for i in range(NUM_ROWS)]
NUMBERS: dict[str, Any] = {
    "pandas nullable integers": pandas.array(INTEGERS, dtype="Int64"),
    "pandas arrow integers": pandas.array(INTEGERS, dtype="int64[pyarrow]"),
    "pandas objects": pandas.Series(INTEGERS, dtype=object),
    "pandas floats": pandas.Series(INTEGERS, dtype=float),
    "pandas decimals": pandas.Series([None if i is None else decimal.Decimal(i) for i in INTEGERS], dtype=object),
    "polars integers": polars.Series(INTEGERS, dtype=polars.Int16),
    "polars decimals": polars.Series(INTEGERS).cast(polars.Decimal(10, 2)),
}
TEXT: dict[str, Any] = {
    "pandas objects": pandas.Series(TEXTS, dtype=object),
    "pandas objects with nan": pandas.Series([text or np.nan for text in TEXTS], dtype=object),
    "pandas strings": pandas.Series(TEXTS, dtype="string"),
    "pandas categories": pandas.Series(TEXTS, dtype="category"),
    "pandas arrow strings": pandas.array(TEXTS, dtype="string[pyarrow]"),
    "polars strings": polars.Series(TEXTS),
    "polars categories": polars.Series(TEXTS, dtype=polars.Categorical),
    "polars enumeration": polars.Series(TEXTS, dtype=polars.Enum(["00", "01", "02", "03"])),
}


def prepared_column(column: Any, **parameters: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """What was saved about a column, and its inputs."""
    library = polars if isinstance(column, polars.Series) else pandas
    frame = library.DataFrame({"x": column, "label": cells()["label"]})
    splits = of_frames(frame, **parameters).load(0)
    return splits.preparation["columns"][0], splits.train[0]


@pytest.mark.parametrize("column", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_all_types_are_numbers_with_the_same_missing_values(column):
    saved, inputs = prepared_column(column)
    expected, values = prepared_column(pandas.Series(INTEGERS, dtype=float))
    assert saved == expected
    assert saved["missing"] == 14
    assert torch.equal(inputs, values)


@pytest.mark.parametrize("column", TEXT.values(), ids=TEXT)
def test_text_of_all_types_is_categories_even_if_it_looks_like_numbers(column):
    saved, _ = prepared_column(column)
    assert (saved["kind"], saved["missing"]) == ("category", 14)
    assert saved["categories"] == ["(missing)", "00", "01", "02", "03"]


@pytest.mark.parametrize("name", ["pandas nullable integers", "pandas arrow integers", "polars integers"])
def test_integers_are_categories_without_a_decimal_point(name):
    assert prepared_column(NUMBERS[name], categorical=("x",))[0]["categories"] == ["(missing)", "0", "1", "2", "3"]
    categories = pandas.Series(INTEGERS, dtype="Int64").astype("category")
    assert prepared_column(categories)[0]["categories"] == ["(missing)", "0", "1", "2", "3"]


def test_booleans_are_numbers_and_mixed_values_are_read_as_in_csv_files(make):
    flags = [None if i % 5 == 0 else i % 2 == 0 for i in range(NUM_ROWS)]
    table = of_frames(make({"flag": flags, "label": cells()["label"]}), validation_fraction=0)
    number = table.load(0).preparation["columns"][0]
    assert (number["kind"], number["missing"]) == ("number", 8)
    mixed = pandas.DataFrame({"x": ["a", 1, 2.5, None] * 10, "label": cells()["label"]})
    assert raw_frame(mixed, "frame").declared == {"label": "text"}


DAYS = [datetime.date(2024, 3, 1 + i % 28) for i in range(NUM_ROWS)]
MOMENTS = [datetime.datetime(2024, 3, 1, i % 24, 30) for i in range(NUM_ROWS)]
DATES: dict[str, Any] = {
    "pandas timestamps": pandas.Series(MOMENTS),
    "pandas timestamps with a zone": pandas.Series(MOMENTS).dt.tz_localize("UTC"),
    "pandas dates": pandas.Series(DAYS, dtype=object),
    "pandas periods": pandas.Series(pandas.period_range("2024-01", periods=NUM_ROWS, freq="M")),
    "pandas durations": pandas.Series(MOMENTS).diff(),
    "polars dates": polars.Series(DAYS),
    "polars timestamps": polars.Series(MOMENTS),
    "polars times": polars.Series([moment.time() for moment in MOMENTS]),
    "texts": pandas.Series([day.isoformat() for day in DAYS]),
}


@pytest.mark.parametrize("column", DATES.values(), ids=DATES)
def test_dates_of_all_types_are_refused_with_advice(column):
    with pytest.raises(DataError) as raised:
        prepared_column(column, max_categories=100)
    assert '"x" (dates or times, ' in raised.value.what
    assert "year, month, weekday or days since a start" in raised.value.fix
    assert prepared_column(column, columns={"x": "category"})[0]["kind"] == "category"


@pytest.mark.parametrize(
    "column", [[[1, 2]] * NUM_ROWS, [{"a": 1}] * NUM_ROWS, [b"x"] * NUM_ROWS], ids=["lists", "structs", "bytes"]
)
def test_nested_values_are_refused_unless_they_are_ignored(make, column):
    frame = make({**cells(), "nested": column})
    with pytest.raises(DataError, match=r'(?s)expected numbers, text, categories or booleans.*column "nested"'):
        of_frames(frame).load(0)
    assert of_frames(frame, ignore=("nested",)).load(0).info.num_outputs == 2


def test_frames_without_rows_or_with_repeated_names_are_refused(make):
    with pytest.raises(DataError, match="expected at least one row"):
        of_frames(make({"x": [], "label": []})).load(0)
    repeated = pandas.DataFrame([[1, 2, "a"]] * 4, columns=["x", "x", "label"])
    with pytest.raises(DataError, match="distinct names"):
        of_frames(repeated).load(0)


def test_missing_columns_and_bad_values_are_named_by_row(make):
    table = of_frames(make(cells()))
    preparation = table.load(0).preparation
    with pytest.raises(DataError) as raised:
        table.prepare_frame(make({"colour": ["red"], "cost": [1]}), preparation)
    assert 'expected columns "size", "price" of the run\'s training table, got cost' in raised.value.what
    bad = make({"size": ["1", "tall"], "colour": ["red", "red"], "price": [1.0, 2.0]})
    with pytest.raises(DataError, match=r"(?s)expected a number, got 'tall'.*the frame, row 1, column \"size\""):
        table.prepare_frame(bad, preparation)


def test_frames_are_told_from_other_data(make):
    frame = make(cells())
    assert len(frames_of(frame)) == 1
    assert len(frames_of((frame, frame))) == 2
    for other in ((frame, frame["label"]), np.zeros((3, 2)), [1, 2], None, "rows.csv"):
        assert frames_of(other) is None
    with pytest.raises(DataError, match=r"data=frame\.collect\(\)"):
        frames_of((frame, polars.LazyFrame(cells())))


def test_data_and_predictions_import_neither_pandas_nor_polars():
    folders = ("ensemblekit/data", "ensemblekit/inference", "plugins/ensemblekit_datasets")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        assert not re.search(r"^ *(import|from) (pandas|polars)", path.read_text(), re.MULTILINE), path.name


def test_integers_are_the_same_categories_if_a_frame_has_them_as_floating_point_numbers(make):
    table = of_frames(make({"code": [1, 2, 3, -1] * 10, "label": cells()["label"]}), categorical=("code",))
    preparation = table.load(0).preparation
    integers, floats = ({"code": values} for values in ([3, 1, -1], [3.0, 1.0, -1.0]))
    expected = table.prepare_frame(make(integers), preparation).inputs
    assert torch.equal(table.prepare_frame(make(floats), preparation).inputs, expected)
    assert expected.sum() == 3


def test_a_column_of_a_frame_can_be_the_weight_of_the_rows(make):
    weights = [1.0 + i % 3 for i in range(NUM_ROWS)]
    splits = of_frames(make({**cells(), "weight": weights}), weight="weight").load(0)
    assert splits.weights.tolist() == [weights[row] for row in splits.indices["train"].tolist()]
    assert splits.info.input_shape == of_frames(make(cells())).load(0).info.input_shape
