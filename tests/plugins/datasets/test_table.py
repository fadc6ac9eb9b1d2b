"""Tables become features as scikit-learn makes them, fitted on the training rows alone."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ensemblekit_datasets.table import Table
from pydantic import ValidationError
from sklearn.datasets import load_iris
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from ensemblekit import DataError, DataInfo, load_data

TRAIN = """\
height,colour,weight,kind
1.0,red,10,cat
2.0,green,,dog
,red,30,cat
4.0,,40,dog
5.0,green,50,bird
"""
TEST = """\
height,colour,weight,kind
3.0,blue,20,dog
,,NA,cat
6.0,red,60,bird
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str | bytes, name: str = "train.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def fixed_table(write: Any, train: str = TRAIN, test: str = TEST, **parameters: Any) -> Table:
    defaults: dict[str, Any] = {"target": "kind", "validation_fraction": 0}
    return Table(path=write(train), test_path=write(test, "test.csv"), **(defaults | parameters))


def test_features_are_those_of_scikit_learn_fitted_on_the_training_rows(write: Any) -> None:
    splits = fixed_table(write).load(0)
    nan = np.nan
    numbers = np.array([[1, 10], [2, nan], [nan, 30], [4, 40], [5, 50]])
    test_numbers = np.array([[3, 20], [nan, nan], [6, 60]])
    imputer = SimpleImputer().fit(numbers)
    scaler = StandardScaler().fit(imputer.transform(numbers))
    encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
    encoder.fit([["red"], ["green"], ["red"], ["(missing)"], ["green"]])
    test_colours = encoder.transform([["blue"], ["(missing)"], ["red"]])
    expected = np.hstack([scaler.transform(imputer.transform(test_numbers)), test_colours])
    np.testing.assert_allclose(splits.test[0].numpy(), expected, rtol=1e-6)
    assert splits.info == DataInfo("classification", (5,), 3)


def test_a_missing_number_is_the_training_mean_and_an_unknown_category_is_all_zeros(write: Any) -> None:
    inputs = fixed_table(write).load(0).test[0]
    assert inputs[1, :2].tolist() == [0, 0]
    assert inputs[0, 2:].tolist() == [0, 0, 0]
    assert inputs[1, 2:].tolist() == [1, 0, 0]  # the missing colour is a category of its own


def test_classes_keep_their_names_in_order(write: Any) -> None:
    splits = fixed_table(write).load(0)
    assert splits.classes == ("bird", "cat", "dog")
    assert splits.train[1].tolist() == [1, 2, 1, 2, 0]
    assert splits.test[1].tolist() == [2, 1, 0]


def test_classes_that_are_numbers_are_ordered_as_numbers(write: Any) -> None:
    path = write("x,y\n1,10\n2,9\n3,-1\n4,10\n5,9\n6,-1\n")
    assert Table(path=path, target="y").load(0).classes == ("-1", "9", "10")


def iris_csv() -> str:
    iris = load_iris()
    rows = [
        ",".join([*map(str, row), iris.target_names[kind]]) for row, kind in zip(iris.data, iris.target, strict=True)
    ]
    return "a,b,c,d,species\n" + "\n".join(rows) + "\n"


def test_rows_are_split_by_seed_and_scaled_by_the_training_rows_alone(write: Any) -> None:
    table = Table(path=write(iris_csv()), target="species", test_fraction=0.2, validation_fraction=0.1)
    splits, other = table.load(0), table.load(1)
    lengths = [len(part[1]) for part in (splits.train, splits.validation, splits.test)]
    assert lengths == [108, 12, 30]
    assert splits.test[1].bincount().tolist() == [10, 10, 10]
    assert not torch.equal(splits.test[0], other.test[0])
    assert torch.equal(splits.test[0], table.load(0).test[0])
    torch.testing.assert_close(splits.train[0].mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(splits.train[0].std(0, correction=0), torch.ones(4), atol=1e-5, rtol=0)
    data = load_data(table, 0)
    assert data.validation is not None
    assert torch.equal(data.validation.inputs, splits.validation[0])


def test_regression_of_several_targets_keeps_their_units(write: Any) -> None:
    text = "x,y,z\n" + "".join(f"{i},{i * 100},{-i}\n" for i in range(10))
    table = Table(path=write(text), target=("y", "z"), task="regression", validation_fraction=0)
    splits = table.load(0)
    targets = torch.cat([splits.train[1], splits.test[1]])
    assert splits.info == DataInfo("regression", (1,), 2)
    assert targets[targets[:, 0].argsort()].tolist() == [[i * 100, -i] for i in range(10)]


def test_npz_and_csv_give_the_same_data(write: Any, tmp_path: Path) -> None:
    iris = load_iris()
    names = np.array(iris.target_names)[iris.target]
    np.savez(tmp_path / "iris.npz", x=iris.data, species=names)
    from_npz = Table(path=tmp_path / "iris.npz", target="species").load(0)
    from_csv = Table(path=write(iris_csv()), target="species").load(0)
    assert from_npz.classes == from_csv.classes
    for ours, theirs in zip((*from_npz.train, *from_npz.test), (*from_csv.train, *from_csv.test), strict=True):
        assert torch.equal(ours, theirs)


def test_numbers_can_be_declared_categories(write: Any) -> None:
    path = write("zone,x,y\n1,0,a\n2,1,b\n3,2,a\n1,3,b\n")
    table = Table(path=path, test_path=path, target="y", categorical=("zone",), validation_fraction=0)
    inputs = table.load(0).train[0]
    assert inputs[:, 1:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_a_byte_order_mark_blank_lines_and_other_delimiters_are_read(write: Any) -> None:
    path = write("\ufeffx;y\n1;a\n\n2;b\n")
    table = Table(path=path, test_path=path, target="y", delimiter=";", validation_fraction=0)
    assert table.load(0).train[1].tolist() == [0, 1]


BAD_ROWS = {
    "word among numbers": (
        TRAIN.replace("4.0", "four"),
        "expected a number as in most rows, got 'four'; .*train.csv, line 5, column \"height\"; .*categorical",
    ),
    "infinite": (TRAIN.replace("50", "inf"), 'expected a finite number, got inf; .*line 6, column "weight"'),
    "fields": (TRAIN.replace("4.0,,", "4.0,"), "expected 4 fields as in the header, got 3; .*train.csv, line 5"),
    "class missing": (TRAIN.replace("50,bird", "50,"), 'got nothing; .*line 6, column "kind"'),
    "no column": (TRAIN.replace("kind", "sort"), 'expected a column "kind", got height, colour, weight, sort'),
    "repeated name": (TRAIN.replace("colour", "height"), r"expected a header of distinct names, got \['height'\]"),
    "empty": ("", "expected a header of distinct names, got nothing"),
    "no rows": ("height,kind\n", "expected at least one row, got none"),
    "one class": ("x,kind\n1,cat\n2,cat\n", r"expected at least 2 classes, got \['cat'\]"),
    "no features": ("kind\ncat\ndog\n", "expected columns besides the target, got none"),
    "quotes": (TRAIN.replace("red", '"red'), "not valid CSV: .*train.csv, after line"),
    "encoding": (TRAIN.encode().replace(b"red", b"\xff"), "expected UTF-8 text"),
}


@pytest.mark.parametrize(("train", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_bad_tables_are_rejected_with_their_location(write: Any, train: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        fixed_table(write, train).load(0)
    assert re.search(message, raised.value.line)


def test_test_rows_must_be_of_the_kinds_of_the_training_rows(write: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)expected a number, got 'tall'.*.*test.csv, line 2, column \"height\""):
        fixed_table(write, test=TEST.replace("3.0", "tall")).load(0)
    with pytest.raises(DataError, match=r'(?s)one of bird, cat, dog, got cow.*.*test.csv, line 2, column "kind"'):
        fixed_table(write, test=TEST.replace("dog", "cow")).load(0)
    with pytest.raises(DataError, match=r'(?s)expected a column "weight", got height, colour, mass, kind.*.*test.csv'):
        fixed_table(write, test=TEST.replace("weight", "mass")).load(0)


def test_real_targets_must_be_numbers(write: Any) -> None:
    path = write("x,y\n1,2\n2,much\n3,4\n")
    with pytest.raises(DataError, match=r"(?s)expected a number, got 'much'.*.*line 3, column \"y\""):
        Table(path=path, target="y", task="regression").load(0)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)cannot be read: No such file or directory.*.*nowhere.csv"):
        Table(path=tmp_path / "nowhere.csv", target="y").load(0)
    with pytest.raises(DataError, match=r'expected a .csv, .parquet or .npz file, got "table.xlsx"'):
        Table(path=tmp_path / "table.xlsx", target="y").load(0)


class Canary:
    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Canary, "ran", True))


def test_nothing_pickled_in_an_npz_file_is_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", y=np.array([Canary(), Canary()], dtype=object), x=np.arange(2))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Canary()))
    for name in ("bad.npz", "pickle.npz"):
        with pytest.raises(DataError, match="not an NPZ file of numbers and text"):
            Table(path=tmp_path / name, target="y").load(0)
    assert not Canary.ran


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.arange(4)}, "expected arrays of equal length, got"),
        ({"x": np.zeros((3, 2, 2)), "y": np.arange(3)}, r"expected shape \(rows,\) or .*array \"x\""),
    ],
)
def test_arrays_that_are_not_a_table_are_rejected(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "table.npz", **arrays)
    with pytest.raises(DataError) as raised:
        Table(path=tmp_path / "table.npz", target="y").load(0)
    assert re.search(message, raised.value.line)


def test_a_classification_of_several_columns_is_rejected() -> None:
    with pytest.raises(ValidationError, match="needs exactly one target column"):
        Table(path=Path("x.csv"), target=("a", "b"), task="classification")
