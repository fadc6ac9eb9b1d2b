"""A table's preparation is plain numbers: it equals scikit-learn's, survives JSON and needs no training file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ensemblekit_datasets.columns import NumberFormat, typed_columns
from ensemblekit_datasets.encoding import Encoder
from ensemblekit_datasets.table import Table
from ensemblekit_datasets.table_files import read_raw
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from ensemblekit import DataError, Prepared

COLOURS = ("red", "green", "blue", "")


def rows(count: int = 40) -> list[str]:
    random = np.random.default_rng(3)
    sizes = random.normal(50, 10, count)
    written = ["" if i % 7 == 3 else f"{size:.6f}" for i, size in enumerate(sizes)]
    labels = ["yes" if size > 50 else "no" for size in sizes]
    return [f"{written[i]},{COLOURS[i % 4]},{1e7 + i / 3:.6f},{labels[i]}" for i in range(count)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.csv"
    path.write_text("\n".join(["size,colour,price,label", *rows()]))
    return path


def saved(table: Table) -> Any:
    """The preparation as a run reads it back."""
    return json.loads(json.dumps(table.load(0).preparation))


def prepared(table: Table, new: Path, text: str) -> Prepared:
    preparation = saved(table)
    new.write_text(text)
    return table.prepare(new, preparation)


def test_the_features_are_bit_by_bit_those_of_scikit_learns_pipeline(file):
    columns = typed_columns(read_raw(file, ","), {"size": None, "colour": None, "price": None}, NumberFormat())
    fit_on = torch.arange(0, 40, 2)
    ours = Encoder.fit(columns, fit_on, columns.by_name)(columns)
    numbers, fitted = (  # column by column in memory: sums depend on it in the last bit
        np.array([columns.by_name[name][rows] for name in ("size", "price")]).T
        for rows in (slice(None), fit_on.numpy())
    )
    colours = np.array([[value or "(missing)"] for value in columns.by_name["colour"]])
    scaler = make_pipeline(SimpleImputer(), StandardScaler()).fit(fitted)
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(colours[fit_on])
    theirs = np.hstack([scaler.transform(numbers), one_hot.transform(colours)]).astype(np.float32)
    np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("target", ["label", "price"])
def test_a_file_is_prepared_as_the_training_rows_were_without_the_training_file(file, target):
    table = Table(path=file, target=target, validation_fraction=0)
    splits, preparation, text = table.load(0), saved(table), file.read_text()
    file.unlink()
    new = file.with_name("new.csv")
    new.write_text(text)
    result = table.prepare(new, preparation)
    assert result.targets is not None
    known = {(*inputs, *target) for inputs, target in zip(result.inputs.tolist(), flat(result.targets), strict=True)}
    for inputs, targets in (splits.train, splits.test):
        assert {(*row, *value) for row, value in zip(inputs.tolist(), flat(targets), strict=True)} <= known


def flat(targets: torch.Tensor) -> list[list[float]]:
    return targets.reshape(len(targets), -1).tolist()


def test_columns_may_be_in_any_order_and_others_are_left_out(file, tmp_path):
    table = Table(path=file, target="label")
    ordered = prepared(table, tmp_path / "a.csv", "size,colour,price\n50,red,1\n,green,2\n")
    shuffled = prepared(table, tmp_path / "b.csv", "note,price,colour,size\nx,1,red,50\ny,2,green,\n")
    assert torch.equal(ordered.inputs, shuffled.inputs)


def test_every_missing_column_is_named_with_those_that_are_there_instead(file, tmp_path):
    with pytest.raises(DataError) as raised:
        prepared(Table(path=file, target="label"), tmp_path / "new.csv", "colour,cost\nred,5\n")
    assert 'columns "size", "price" of the run\'s training table, got cost' in raised.value.what


def test_a_bad_value_is_named_by_its_line(file, tmp_path):
    with pytest.raises(DataError, match=r"(?s)expected a number, got 'tall'.*new.csv, line 3, column \"size\""):
        prepared(Table(path=file, target="label"), tmp_path / "new.csv", "size,colour,price\n1,red,1\ntall,red,1\n")


def test_a_number_beyond_all_bounds_is_named_by_its_line(file, tmp_path):
    with pytest.raises(DataError, match=r"(?s)too large for this column: 1e\+300.*new.csv, line 2, column \"size\""):
        prepared(Table(path=file, target="label"), tmp_path / "new.csv", "size,colour,price\n1e300,red,1\n")


@pytest.mark.parametrize("damage", [{"columns": None}, {"columns": [{"role": "feature"}]}, {"decimal": []}])
def test_a_damaged_preparation_is_no_traceback(file, damage):
    table = Table(path=file, target="label")
    with pytest.raises(DataError, match=r"(?s)unexpected structure.*model.json|expected"):
        table.prepare(file, saved(table) | damage)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("size,colour,price\n1,red,1\n", 'expected a column "label" to predict'),
        ("size,colour,price,label\n1,red,1,\n", "expected one of no, yes, got nothing"),
        ("size,colour,price,label\n1,red,1,maybe\n", "expected one of no, yes, got maybe"),
    ],
)
def test_rows_without_a_target_are_prepared_and_say_what_is_missing(file, tmp_path, text, reason):
    result = prepared(Table(path=file, target="label"), tmp_path / "new.csv", text)
    assert len(result.inputs) == 1
    assert result.targets is None
    assert result.no_targets is not None
    assert reason in result.no_targets.what


def test_the_preparation_says_what_was_done_with_each_column(file):
    table = Table(path=file, target="label", columns={"price": "ignore"}, validation_fraction=0)
    columns = {column["name"]: column for column in saved(table)["columns"]}
    assert [column["role"] for column in columns.values()] == ["feature", "feature", "ignored", "target"]
    assert (columns["size"]["kind"], columns["size"]["missing"]) == ("number", 6)
    assert (columns["colour"]["categories"], columns["colour"]["missing"]) == (
        ["(missing)", "blue", "green", "red"],
        10,
    )
    notes = dict(table.load(0).notes)
    assert notes["columns"] == "1 of numbers, 1 of categories, 1 ignored; together 5 inputs"
    assert notes["  size"] == "number, 6 missing"
    assert notes["  colour"] == "category, 4 values, 10 missing"
    assert (notes["  price"], notes["  label"]) == ("ignored", "target, category, 2 classes")


def test_real_targets_keep_their_digits_and_are_standardised_by_the_run(file):
    splits = Table(path=file, target="price", validation_fraction=0).load(0)
    assert splits.info.task == "regression"
    assert splits.standardise_targets
    assert splits.train[1].dtype == torch.float64
    assert not Table(path=file, target="price", standardise_targets=False).load(0).standardise_targets


def test_a_table_of_a_run_of_version_0_1_0_is_not_asked_about_and_not_scaled(tmp_path):
    file = tmp_path / "ids.csv"
    file.write_text("id,size,y\n" + "".join(f"name{i},{i},{i + 0.5}\n" for i in range(60)))
    table = Table(path=file, target="y", task="regression")
    with pytest.raises(DataError, match="one input per value"):
        table.load(0)
    old = table.in_format(1)
    assert not old.load(0).standardise_targets
    assert old.read_features(file, 0).shape[0] == 60
    assert table.in_format(2) is table


OLDER: dict[str, Any] = {
    "columns": [
        {"name": "size", "role": "feature", "missing": 1, "kind": "number", "fill": 2.0, "mean": 2.0, "std": 0.5},
        {"name": "label", "role": "target", "missing": 0, "kind": "category"},
        {"name": "colour", "role": "feature", "missing": 0, "kind": "category", "categories": ["blue", "red"]},
    ],
    "targets": ["label"],
    "classes": ["no", "yes"],
    "delimiter": ",",
    "decimal": ".",
}
"""As runs have it that were trained before there were groups, quantiles and frames."""


def test_a_preparation_of_an_earlier_run_is_still_understood(tmp_path):
    new = tmp_path / "new.csv"
    new.write_text("size,colour,label\n3,red,yes\n,green,no\n")
    result = Table(path=Path("gone.csv"), target="label").prepare(new, OLDER)
    assert result.inputs.tolist() == [[2, 0, 1], [0, 0, 0]]
    assert result.targets.tolist() == [1, 0]
