"""Runs on frames are trained, resumed and evaluated with frames of pandas or polars, or files of the same rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek

NUM_ROWS = 120
SPEC = {
    "model": {"name": "mlp", "hidden": [8], "embedding": "auto"},
    "ensemble": {"members": 2},
    "training": {"epochs": 2, "batch_size": 32},
    "engine": {"name": "sequential", "device": "cpu"},
}
DATA = {"target": "label", "group": "shop", "scaling": "quantile"}


def frame() -> pandas.DataFrame:
    random = np.random.default_rng(0)
    sizes = random.lognormal(size=NUM_ROWS).round(4)
    columns = {
        "size": np.where(np.arange(NUM_ROWS) % 9 == 0, np.nan, sizes),
        "colour": pandas.Categorical(random.choice(["red", "green", "blue"], NUM_ROWS)),
        "count": pandas.array([None if i % 7 == 0 else i % 5 for i in range(NUM_ROWS)], dtype="Int64"),
        "new": random.random(NUM_ROWS) < 0.5,
        "shop": random.integers(0, 30, NUM_ROWS),
        "label": np.where(sizes > 1, "large", "small"),
    }
    return pandas.DataFrame(columns)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "run"
    ek.train({**SPEC, "data": DATA}, path, progress=False, data=frame())
    return path


def test_a_spec_with_a_target_needs_neither_name_nor_path_and_the_run_says_what_it_is(trained):
    data = ek.open_run(trained).spec.data
    assert (data.name, data.path, data.target) == ("table", None, "label")
    columns = ek.load(trained).preparation["columns"]
    roles = {column["name"]: (column["role"], column["kind"]) for column in columns}
    assert roles["shop"] == ("group", "category")
    assert roles["size"] == ("feature", "quantile")
    assert roles["colour"] == ("feature", "category")


def test_both_libraries_and_all_files_of_the_same_rows_are_predicted_alike(trained, tmp_path):
    ensemble, rows = ek.load(trained), frame()
    expected = ensemble.predict_proba(rows)
    assert torch.equal(ensemble.predict_proba(polars.from_pandas(rows)), expected)
    assert torch.equal(ensemble.predict_proba(rows[["label", "new", "size", "count", "colour"]]), expected)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    answers = {}
    for name in ("rows.csv", "rows.parquet"):
        result = run("predict", str(trained), str(tmp_path / name), "--probabilities", "--json")
        assert result.exit_code == 0, result.output
        answers[name] = [row["probability[large]"] for row in json.loads(result.stdout)]
        evaluated = ek.evaluate_run(trained, data=tmp_path / name)
        assert (
            evaluated == ek.evaluate_run(trained, data=rows) == ek.evaluate_run(trained, data=polars.from_pandas(rows))
        )
    assert answers["rows.csv"] == answers["rows.parquet"] == pytest.approx(expected[:, 0].tolist(), abs=1e-6)
    result = run("evaluate", str(trained), "--data", str(tmp_path / "rows.parquet"), "--json")
    assert json.loads(result.stdout)["test_accuracy"] == evaluated["test_accuracy"]


def test_frames_that_do_not_fit_are_refused_by_what_is_missing(trained):
    ensemble = ek.load(trained)
    with pytest.raises(ek.DataError, match=r'(?s)expected columns "size", "count".*got shop'):
        ensemble.predict(frame()[["colour", "new", "shop"]])
    with pytest.raises(ek.DataError, match='expected a column "label" to predict'):
        ek.evaluate_run(trained, data=frame().drop(columns="label"))
    with pytest.raises(ek.DataError, match="expected one of large, small, got huge"):
        ek.evaluate_run(trained, data=frame().assign(label="huge"))
    inputs = ensemble.as_inputs(frame(), torch.device("cpu"))
    assert torch.equal(ensemble.predict_proba(inputs), ensemble.predict_proba(frame()))  # prepared already


def test_a_frame_can_be_other_data_for_out_of_distribution_measures(trained, tmp_path):
    rows = frame()
    whole = ek.train(
        {**SPEC, "data": {**DATA, "name": "table", "path": _written(rows, tmp_path)}}, tmp_path / "run", progress=False
    )
    assert 0 <= ek.evaluate_run(whole.path, ood=rows.assign(size=1e6))["ood_auroc_entropy"] <= 1


def _written(rows: pandas.DataFrame, folder: Path) -> str:
    rows.to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def test_what_follows_training_needs_the_frame_no_more(trained, tmp_path):
    path = Path(shutil.copytree(trained, tmp_path / "run"))
    expected = ek.load(path).predict_proba(frame())
    assert ek.evaluate_run(path, combiner="mean")["test_accuracy"] == ek.open_run(path).metrics["test_accuracy"]
    ek.calibrate(path)
    assert not torch.equal(ek.load(path).predict_proba(frame()), expected)
    ek.undo_calibrate(path)
    assert torch.equal(ek.load(path).predict_proba(frame()), expected)
    assert "without their inputs" in ek.report(path).read_text()
    ek.select(path, members=1, out=tmp_path / "one")
    assert ek.load(tmp_path / "one").predict(frame()).shape == (NUM_ROWS,)


def test_a_run_on_frames_is_resumed_with_the_same_frames_only(trained, tmp_path):
    path = Path(shutil.copytree(trained, tmp_path / "run"))
    changed = frame()
    changed.loc[changed["label"] == "small", "size"] = 2.0
    with pytest.raises(ek.DataError, match="the data is not what the run was started with") as raised:
        ek.resume(path, progress=False, data=changed, epochs=3)
    assert raised.value.exit_code == 3
    for verb in (("evaluate",), ("resume", "--epochs", "3")):
        result = run(verb[0], str(path), *verb[1:])
        assert result.exit_code == 3
        assert "the rows of this table were passed in Python" in last_error(result)
    resumed = ek.resume(path, progress=False, data=polars.from_pandas(frame()), epochs=3)
    assert len(resumed.history) == 3


def test_splits_of_ones_own_and_specs_in_files_work_with_frames(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(
        '[data]\ntarget = "label"\n[model]\nname = "mlp"\nhidden = [4]\n'
        '[training]\nepochs = 1\n[engine]\nname = "sequential"\n'
    )
    parts = [frame()[:80], frame()[80:100], frame()[100:]]
    trained_run = ek.train(file, tmp_path / "run", progress=False, data=tuple(parts))
    assert [len(trained_run.outputs(split).targets) for split in ("validation", "test")] == [20, 20]
    expected = ek.evaluate_run(tmp_path / "run", data=tuple(parts))
    assert expected == pytest.approx(trained_run.metrics, rel=1e-4, abs=1e-6)


BAD: list[tuple[dict[str, Any], Any, str]] = [
    ({}, frame(), r"data\.target: missing"),
    ({"data": {"name": "given"}}, frame(), "name the target in the spec"),
    ({"data": {"name": "table", "target": "label"}}, None, r"data\.path: missing"),
    ({"data": {"name": "table", "target": "price"}}, frame(), 'expected a column "price"'),
]


@pytest.mark.parametrize(("more", "data", "what"), BAD)
def test_frames_and_specs_that_do_not_belong_together_are_explained(more, data, what, tmp_path):
    with pytest.raises(ek.EnsemblekitError, match=what):
        ek.train({**SPEC, **more}, tmp_path / "run", progress=False, data=data)
    assert not (tmp_path / "run").exists()


def test_a_table_without_a_path_is_a_problem_of_the_spec(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text('[data]\nname = "table"\ntarget = "y"\n[model]\nname = "mlp"\n')
    result = run("validate", str(file))
    assert result.exit_code == 2
    assert "data.path: missing" in result.output
