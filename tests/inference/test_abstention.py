"""Abstention: exactly the predictions below a confidence are marked, in every format, and what is refused."""

from __future__ import annotations

import csv
import io
import json

import pyarrow.parquet
import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A run whose classes have no names, and a file of rows."""
    path = tmp_path_factory.mktemp("abstention")
    inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    classes = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    spec = {"model": {"name": "mlp", "hidden": [8]}, "ensemble": {"members": 2}, "engine": {"name": "sequential"}}
    ek.train(spec | {"training": {"epochs": 40}}, path / "run", data=(inputs, classes), progress=False)
    lines = "\n".join(f"{a},{b}" for a, b in inputs[:60].tolist())
    (path / "rows.csv").write_text(f"a,b\n{lines}\n")
    return path


def records(table, *options: str) -> list[dict[str, str]]:
    result = run("predict", str(table / "run"), str(table / "rows.csv"), *options)
    assert result.exit_code == 0, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_predictions_are_marked_where_one_minus_the_probability_is_above_the_threshold(table, threshold):
    plain, marked = records(table), records(table, "--abstain-above", str(threshold))
    unsure = [1 - float(record["probability"]) > threshold for record in plain]
    assert [record["class"] == "abstained" for record in marked] == unsure
    assert threshold in (0.0, 1.0) or 0 < sum(unsure) < 60
    for before, after, is_unsure in zip(plain, marked, unsure, strict=True):
        assert {**after, "class": "abstained" if is_unsure else before["class"]} == after
        assert {**before, "class": after["class"]} == after


def test_the_number_of_abstentions_is_said_on_standard_error(table):
    result = run("predict", str(table / "run"), str(table / "rows.csv"), "--abstain-above", "0.3")
    count = sum(",abstained," in line for line in result.stdout.splitlines())
    assert f"note: abstained from {count} of 60 predictions" in result.stderr


def test_classes_without_names_stay_of_one_type(table, tmp_path):
    arguments = ("predict", str(table / "run"), str(table / "rows.csv"), "--abstain-above", "0.3")
    classes = {record["class"] for record in json.loads(run(*arguments, "--json").stdout)}
    assert classes <= {"0", "1", "2", "abstained"}
    assert run(*arguments, "--output", str(tmp_path / "out.parquet")).exit_code == 0
    column = pyarrow.parquet.read_table(tmp_path / "out.parquet")["class"].to_pylist()
    assert set(column) == classes


@pytest.mark.faults
@pytest.mark.parametrize("threshold", ["-0.1", "1.5", "nan"])
def test_a_threshold_that_is_not_a_probability_is_refused(table, threshold):
    result = run("predict", str(table / "run"), str(table / "rows.csv"), "--abstain-above", threshold)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected a number from 0 to 1" in last_error(result)


@pytest.mark.faults
def test_a_regression_and_a_class_of_that_name_are_refused(table, tmp_path):
    inputs = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    spec = {"model": {"name": "mlp", "hidden": [2]}, "engine": {"name": "sequential"}}
    values = spec | {"training": {"epochs": 1, "loss": "mse"}}
    ek.train(values, tmp_path / "values", data=(inputs, inputs.sum(dim=1)), progress=False)
    names = ["voted" if first > 0 else "abstained" for first in inputs[:, 0].tolist()]
    ek.train(spec | {"training": {"epochs": 1}}, tmp_path / "votes", data=(inputs, names), progress=False)
    for name, part in (("values", "no class to withhold"), ("votes", 'a class of the run is named "abstained"')):
        result = run("predict", str(tmp_path / name), str(table / "rows.csv"), "--abstain-above", "0.1")
        assert result.exit_code == 2
        assert part in last_error(result)
