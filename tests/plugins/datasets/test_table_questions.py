"""What a table does not say clearly is asked: names of rows as categories, classes or real values, delimiters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ensemblekit_datasets.table import Table
from pydantic import ValidationError

from ensemblekit import DataError


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """Makes a data set of a CSV file with a column x and the columns given here."""

    def make(cells: dict[str, list[Any]], **parameters: Any) -> Table:
        length = len(next(iter(cells.values())))
        cells = {"x": list(range(length)), **cells}
        lines = [",".join(cells), *(",".join(map(str, row)) for row in zip(*cells.values(), strict=True))]
        path = tmp_path / "rows.csv"
        path.write_text("\n".join(lines) + "\n")
        return Table(path=path, target="y", **parameters)

    return make


LABELS = ["a", "b"] * 100
SUSPICIOUS = {
    "names": [f"row{i}" for i in range(200)],
    "days": [f"2024-03-{i % 28 + 1:02d}" for i in range(200)],
    "german": [f"{i % 28 + 1}.3.2024 12:30" for i in range(200)],
    "cities": [f"city{i % 60}" for i in range(200)],
}
FINE = {"colours": [f"colour{i % 20}" for i in range(200)], "rare": ["", *["x"] * 199]}


def test_columns_that_would_become_one_input_per_value_are_listed_all_at_once(table):
    with pytest.raises(DataError) as raised:
        table({"y": LABELS, **SUSPICIOUS, **FINE}).load(0)
    for name in SUSPICIOUS:
        assert f'"{name}" (' in raised.value.what
    for name in FINE:
        assert f'"{name}"' not in raised.value.what
    assert '"days" (dates or times, 28 values)' in raised.value.what
    assert 'data.ignore = ["names", "days", "german", "cities"]' in raised.value.fix
    assert 'data.columns = { "names" = "category" }' in raised.value.fix


def test_columns_that_are_ignored_already_stay_in_the_suggested_list(table):
    with pytest.raises(DataError) as raised:
        table({"y": LABELS, **SUSPICIOUS}, ignore=("names", "days", "german")).load(0)
    assert 'data.ignore = ["names", "days", "german", "cities"]' in raised.value.fix
    with pytest.raises(DataError) as raised:
        table({"y": LABELS, "old": LABELS, "gap": ["NA"] * 200}, ignore=("old",), columns={"gap": "number"}).load(0)
    assert raised.value.fix == 'remove the column, or set data.ignore = ["old", "gap"]'


@pytest.mark.parametrize(
    ("header", "what"),
    [(",x,y", "the first column has no name (pandas writes its index)"), ("x,,y", "got none of column 2")],
)
def test_a_column_without_a_name_is_named_by_its_position(tmp_path, header, what):
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n0,1,a\n1,2,b\n")
    with pytest.raises(DataError) as raised:
        Table(path=path, target="y").load(0)
    assert what in raised.value.what
    assert ("to_csv(index=False)" in raised.value.fix) == header.startswith(",")


def test_errors_about_a_file_give_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as raised:
        Table(path=Path("rows.csv"), target="y").load(0)
    assert raised.value.where == raised.value.path == str(tmp_path / "rows.csv")


def test_each_answer_to_that_question_is_taken(table):
    columns = {"y": LABELS, **SUSPICIOUS}
    assert table(columns, ignore=tuple(SUSPICIOUS)).load(0).info.input_shape == (1,)
    assert table(columns, columns=dict.fromkeys(SUSPICIOUS, "ignore")).load(0).info.input_shape == (1,)
    chosen = {"names": "ignore", "german": "ignore", "days": "category", "cities": "category"}
    assert table(columns, columns=chosen).load(0).info.input_shape == (1 + 28 + 60,)
    days = {"days": "category", "german": "category"}
    assert table(columns, max_categories=200, test_fraction=0.5, columns=days).load(0).info.input_shape[0] > 100


def test_a_column_can_be_declared_numbers(table):
    declared = table({"y": LABELS, "z": ["1", *["many"] * 199]}, columns={"z": "number"})
    with pytest.raises(DataError, match=r"(?s)expected a number, got 'many'.*line 3, column \"z\""):
        declared.load(0)


def test_an_ignored_column_is_not_even_looked_at(table):
    mixed = ["word" if i % 3 == 0 else "1" for i in range(200)]
    with pytest.raises(DataError, match="as in most rows"):
        table({"y": LABELS, "mixed": mixed}).load(0)
    assert table({"y": LABELS, "mixed": mixed}, ignore=("mixed",)).load(0).info.input_shape == (1,)


@pytest.mark.parametrize("parameters", [{"ignore": ("z",)}, {"columns": {"z": "ignore"}}, {"categorical": ("z",)}])
def test_a_column_that_does_not_exist_is_named(table, parameters):
    with pytest.raises(DataError, match='expected a column "z", got x, y'):
        table({"y": LABELS}, **parameters).load(0)


@pytest.mark.parametrize("parameters", [{"ignore": ("y",)}, {"columns": {"y": "number"}}, {"categorical": ("y",)}])
def test_the_target_is_no_feature(table, parameters):
    with pytest.raises(ValidationError, match='names the target "y"'):
        table({"y": LABELS}, **parameters)


TASKS = {
    "text": (LABELS, "classification"),
    "few integers": ([0, 1, 2, 3] * 50, "classification"),
    "integers as floats": (["0.0", "1.0"] * 100, "classification"),
    "many fractions": ([i / 7 for i in range(200)], "regression"),
    "fractions and gaps": ([i + 0.25 for i in range(50)] * 4, "regression"),
}


@pytest.mark.parametrize(("values", "task"), TASKS.values(), ids=TASKS.keys())
def test_a_clear_target_needs_no_task(table, values, task):
    assert table({"y": values}).load(0).info.task == task


UNCLEAR = {
    "few fractions": ([0.5, 1.5, 2.5, 3.5] * 50, "decimal fractions, but only 4 different values"),
    "many integers": (list(range(50)) * 4, "50 different integers in 200 rows"),
    "integers that hardly repeat": ([1, 2, 3, 4, 5, 6, 6, 6], "6 different integers in 8 rows"),
}


@pytest.mark.parametrize(("values", "what"), UNCLEAR.values(), ids=UNCLEAR.keys())
def test_an_unclear_target_is_a_question_that_either_task_answers(table, values, what):
    with pytest.raises(DataError, match=what) as raised:
        table({"y": values}).load(0)
    assert 'data.task = "classification", or data.task = "regression"' in raised.value.fix
    assert table({"y": values}, task="regression").load(0).info.task == "regression"
    assert table({"y": values}, task="classification", validation_fraction=0).load(0).info.task == "classification"


MANY_CLASSES = {
    "text": [f"class{i}" for i in range(101)] * 3,
    "names of rows": [f"row{i}" for i in range(60)],
    "fractions": [i + 0.5 for i in range(25)] * 4,
    "integers": list(range(101)) * 3,
}


@pytest.mark.parametrize("values", MANY_CLASSES.values(), ids=MANY_CLASSES.keys())
def test_hundreds_of_classes_have_to_be_confirmed(table, values):
    with pytest.raises(DataError, match=rf"{len(set(values))} classes in {len(values)} rows") as raised:
        table({"y": values}, task="classification").load(0)
    assert f"data.max_classes = {len(set(values))}" in raised.value.fix
    assert ('data.task = "regression"' in raised.value.fix) == (not isinstance(values[0], str))
    confirmed = table({"y": values}, task="classification", max_classes=len(set(values)), validation_fraction=0)
    confirmed = confirmed.model_copy(update={"test_path": confirmed.path})
    assert confirmed.load(0).info.num_outputs == len(set(values))


@pytest.mark.parametrize(("delimiter", "written"), [(";", '";"'), ("\t", r'"\t"'), ("|", '"|"')])
def test_another_delimiter_is_suggested(tmp_path, delimiter, written):
    path = tmp_path / "rows.csv"
    path.write_text(f"x{delimiter}y\n1,5{delimiter}a\n2,5{delimiter}b\n")
    with pytest.raises(DataError) as raised:
        Table(path=path, target="y").load(0)
    assert raised.value.fix == f"set data.delimiter = {written}"


@pytest.mark.parametrize("target", ["y", "x"])
def test_decimal_commas_are_recognised_and_read_when_declared(tmp_path, target):
    path = tmp_path / "rows.csv"
    path.write_text("x;y\n" + "".join(f"1.{i:03d},5;{i},25\n" for i in range(30)))
    with pytest.raises(DataError, match="with a decimal point, got") as raised:
        Table(path=path, target=target, delimiter=";").load(0)
    assert raised.value.fix == 'set data.decimal = ","'
    german = Table(path=path, target="y", delimiter=";", decimal=",", test_path=path, validation_fraction=0).load(0)
    assert german.train[1].flatten().tolist() == [i + 0.25 for i in range(30)]
    assert german.preparation["columns"][0]["mean"] == pytest.approx(1014.5 + 0.5)


def test_underscores_do_not_join_numbers(table):
    assert table({"y": LABELS, "code": ["1_0", "2_0"] * 100}).load(0).info.input_shape == (3,)


def test_an_empty_list_of_targets_is_refused_by_the_spec():
    with pytest.raises(ValidationError, match="target"):
        Table.from_table({"path": "rows.csv", "target": []})
