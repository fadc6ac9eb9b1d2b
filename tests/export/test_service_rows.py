"""Rows of tables and arrays are prepared by the service as `predict` prepares files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from helpers.services import problem, serving
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

import ensemblekit as ek
from ensemblekit.core.errors import NumericError, RunError
from ensemblekit.export.service_inputs import rows_of
from ensemblekit.export.service_limits import Limits
from ensemblekit.export.service_state import Service
from ensemblekit.inference.prediction import predict_files

SPEC = {
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"members": 2},
    "training": {"epochs": 3, "batch_size": 16},
    "engine": {"name": "sequential", "device": "cpu"},
}
NEW = [
    {"size": "0.5", "colour": "red", "shop": "1"},
    {"size": "", "colour": "blue", "shop": "2"},
    {"size": "-1.25", "colour": "unheard of", "shop": "1"},
    {"size": "2", "colour": "", "shop": ""},
]
"""Rows of a CSV file with missing values and a new category."""
ROWS: list[dict[str, Any]] = [
    {"size": 0.5, "colour": "red", "shop": 1, "note": "left out"},
    {"size": None, "colour": "blue", "shop": 2.0},
    {"colour": "unheard of", "shop": "1", "size": -1.25},
    {"size": 2, "colour": None, "shop": None},
]
"""The same rows in JSON."""


def table(decimal: str = ".") -> str:
    """A table whose class depends on its number, and whose values depend on it linearly."""
    random = np.random.default_rng(0)
    lines = ["size;colour;shop;label;price;cost;warm;light"]
    for number in random.normal(0, 1, 60).round(3).tolist():
        fields = [number, random.choice(["red", "green", "blue"]), random.integers(1, 3), "big" if number > 0 else "no"]
        fields += [round(100 + 9 * number, 3), round(5 - number, 3), int(number > 0), int(number > 1)]
        lines.append(";".join(map(str, fields)))
    return "\n".join(lines).replace(".", decimal)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Runs on one table: of a class, labels, a value with intervals, and two values written with decimal commas."""
    folder, made = tmp_path_factory.mktemp("tables"), {}
    columns = {"label", "price", "cost", "warm", "light"}
    for name, (task, target, decimal) in {
        "class": ("classification", ["label"], "."),
        "labels": ("multilabel", ["warm", "light"], "."),
        "value": ("regression", ["price"], "."),
        "two": ("regression", ["price", "cost"], ","),
    }.items():
        file = folder / f"{name}.csv"
        file.write_text(table(decimal))
        data: dict[str, Any] = {"name": "table", "path": str(file), "delimiter": ";", "decimal": decimal, "task": task}
        data |= {"target": target if len(target) > 1 else target[0], "ignore": sorted(columns - set(target))}
        made[name] = folder / f"run-{name}"
        ek.train({**SPEC, "data": {**data, "categorical": ["shop"]}}, made[name], progress=False)
    ek.conform(made["value"], error=0.3)
    return made


def predicted(run: Path, folder: Path, decimal: str = ".") -> list[dict[str, Any]]:
    """What `predict` says about the new rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["colour", "size", "shop"], delimiter=";")
    writer.writeheader()
    writer.writerows(NEW)
    (folder / "new.csv").write_text(text.getvalue().replace(".", decimal))
    return [one.to_dict() for one in predict_files(ek.load(run), [folder / "new.csv"], probabilities=True)]


def test_rows_by_name_and_in_order_are_answered_as_predict_answers_a_file(runs, tmp_path):
    in_order = [[row["size"], row["colour"], row["shop"]] for row in ROWS]
    with serving(runs["class"]) as (url, _):
        answers = httpx.post(f"{url}/predict", json={"rows": ROWS}).json()["predictions"]
        assert httpx.post(f"{url}/predict", json=in_order).json()["predictions"] == answers
        page = httpx.get(f"{url}/docs").text
    expected = predicted(runs["class"], tmp_path)
    assert [answer["class"] for answer in answers] == [record["class"] for record in expected]
    assert len({answer["probability"] for answer in answers}) == len(ROWS)
    for answer, record in zip(answers, expected, strict=True):
        for name, probability in answer["probabilities"].items():
            assert probability == pytest.approx(record[f"probability[{name}]"], abs=1e-6)
        assert answer["uncertainty"]["entropy"] == pytest.approx(record["entropy"], abs=1e-6)
    assert "blue, green, red" in page


def answers_of(run: Path) -> list[dict[str, Any]]:
    with serving(run) as (url, _):
        response = httpx.post(f"{url}/predict", json=ROWS)
        assert response.status_code == 200, response.text
        return response.json()["predictions"]


def test_values_have_intervals_and_spreads_as_predict_prints_them(runs, tmp_path):
    for answer, record in zip(answers_of(runs["value"]), predicted(runs["value"], tmp_path), strict=True):
        assert answer["value"] == pytest.approx(record["value"], rel=1e-6)
        ends = {name: pytest.approx(record[name], rel=1e-6) for name in ("low", "high")}
        assert answer["interval"] == ends
        assert answer["uncertainty"] == {"standard_deviation": pytest.approx(record["standard_deviation"], abs=1e-5)}


def test_labels_are_lists_with_the_probability_of_each(runs, tmp_path):
    for answer, record in zip(answers_of(runs["labels"]), predicted(runs["labels"], tmp_path), strict=True):
        assert ";".join(answer["labels"]) == record["labels"]
        named = {f"probability[{name}]": value for name, value in answer["probabilities"].items()}
        assert named == {name: pytest.approx(record[name], abs=1e-6) for name in named}
        assert len(named) == 2
        assert answer["uncertainty"]["agreement"] == record["agreement"]


def test_several_values_are_lists_and_json_numbers_do_not_depend_on_the_decimal_comma_of_a_table(runs, tmp_path):
    for answer, record in zip(answers_of(runs["two"]), predicted(runs["two"], tmp_path, ","), strict=True):
        assert answer["value"] == [pytest.approx(record[f"value_{index}"], rel=1e-6) for index in range(2)]
        spreads = [pytest.approx(record[f"standard_deviation_{index}"], abs=1e-5) for index in range(2)]
        assert answer["uncertainty"] == {"standard_deviation": spreads}


@pytest.fixture(scope="module")
def served(runs):
    with serving(runs["class"]) as (url, service), httpx.Client(base_url=url) as client:
        yield client, service


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"size": 1}, 'expected columns "colour", "shop", got "size"; row 2'),
        ([1, "red"], "array of 3 values, got 2 values; row 2"),
        ("red", "got a value of type string; row 2"),
        ({"size": "big", "colour": "red", "shop": 1}, "expected a number, got 'big'; row 2, column \"size\""),
        ({"size": True, "colour": "red", "shop": 1}, "expected a number, got True"),
        ({"size": 1e39, "colour": "red", "shop": 1}, 'too large for this column: 1e+39; rows, row 2, column "size"'),
        ({"size": 10**400, "colour": "red", "shop": 1}, "expected a finite number"),
        ({"size": 1, "colour": ["red"], "shop": 1}, "expected a text, got a value of type array"),
    ],
)
def test_a_row_that_does_not_fit_the_table_is_refused_by_its_number_and_column(served, row, error):
    assert error in problem(served[0].post("/predict", json=[ROWS[0], row]), 422)["error"]


def test_a_number_that_json_does_not_have_is_refused(served):
    for constant in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'[{{"size": {constant}, "colour": "red", "shop": 1}}]'
        response = served[0].post("/predict", content=body, headers={"Content-Type": "application/json"})
        assert "number" in problem(response, 422)["error"]
    assert "application/json" in problem(served[0].post("/predict", files=[("files", b"x")]), 415)["fix"]


def test_extreme_numbers_fail_alone_and_not_with_the_requests_that_they_were_joined_with(served):
    _, service = served
    inputs = service.rows.prepare([ROWS[0], ROWS[1], ROWS[0]])
    inputs[1] = float("inf")
    first, bad, last = service.batcher.predict(inputs, 5)
    assert first == last
    assert first["class"] in ("big", "no")
    assert isinstance(bad, NumericError)


def test_the_table_keeps_what_its_openapi_document_promises(served):
    client, _ = served
    config = SchemathesisConfig.from_dict(
        {"checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "422"]}}}  # 422: numbers of any size
    )
    schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json", config=config)
    example = schema["/predict"]["POST"].definition.raw["requestBody"]["content"]["application/json"]["example"]
    assert client.post("/predict", json=example).status_code == 200
    for mode in GenerationMode:

        @settings(
            max_examples=10,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=schema["/predict"]["POST"].as_strategy(mode))
        def check(case: Any) -> None:
            case.call_and_validate()

        check()


def test_arrays_of_numbers_are_rows_too_and_the_example_is_one_that_works(tmp_path):
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(40, 3)).astype(np.float32), random.integers(0, 2, 40)
    run = ek.train(SPEC, tmp_path / "run", progress=False, data=(inputs, targets))
    service = Service(run, run.ensemble, Limits())
    assert service.rows.description == {"kind": "numbers", "shape": [3]}
    prepared = service.rows.prepare(inputs[:4].tolist())
    np.testing.assert_array_equal(prepared.numpy(), inputs[:4])
    answers = service.batcher.submit(prepared, 2).result(10)
    np.testing.assert_array_equal([answer["class"] for answer in answers], run.ensemble.predict(inputs[:4]))
    with pytest.raises(ek.DataError, match="finite"):
        service.rows.prepare([[1e300, 0, 0]])
    command = service.examples("http://here")[0]
    assert command.endswith(" http://here/predict")
    assert len(service.rows.prepare(json.loads(command.split("'")[3])["rows"])) == 1
    service.close()


def test_a_data_set_that_prepares_only_files_is_not_served(runs, monkeypatch):
    ensemble = ek.load(runs["class"])
    monkeypatch.setattr(type(ensemble.spec.data), "input_columns", ek.Dataset.input_columns)
    with pytest.raises(ek.PluginError, match="prepares files only"):
        rows_of(ensemble)
    ensemble.preparation = None  # as runs of version 0.1.0
    with pytest.raises(RunError, match=r"version 0\.1\.0"):
        rows_of(ensemble)
