"""The command compare on a sweep: damaged and unfinished runs, figures with and without λ, names as text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.commands import last_error, run

import ensemblekit as ek

SPEC = {
    "data": {"name": "digits", "limit_train": 120, "limit_test": 60},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"members": 2},
    "method": {"name": "gncl"},
    "training": {"epochs": 1, "batch_size": 60},
    "engine": {"name": "stacked", "device": "cpu"},
}
VARIANTS = [
    {"name": "coupled"},
    {"name": "bagging", "set": {"method": "bagging"}},
    {"name": "single", "set": {"ensemble.members": 1, "method": "independent"}},
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """A grid of λ and hidden units, two other methods, two seeds."""
    grid = {"method.lambda": [0, 1], "model.hidden": [[4], [8]]}
    out = tmp_path_factory.mktemp("sweep") / "sweep"
    return ek.sweep(SPEC, grid=grid, variants=VARIANTS, seeds=2, out=out, progress=False).path


def test_a_sweep_is_compared_by_what_its_runs_differ_in(sweep):
    found = json.loads(run("compare", str(sweep), "--json").stdout)
    assert len(found["rows"]) == 8  # 2 λ × 2 models, and 2 methods × 2 models
    assert {row["seeds"] for row in found["rows"]} == {2}
    by_model = json.loads(run("compare", str(sweep), "--by", "model.hidden", "--json").stdout)
    assert [row["seeds"] for row in by_model["rows"]] == [8, 8]


@pytest.mark.parametrize("fault", ["damaged", "unfinished"])
def test_runs_that_cannot_be_compared_are_named_and_left_out(sweep, tmp_path, fault):
    copy = Path(shutil.copytree(sweep, tmp_path / "sweep"))
    spoilt = sorted((copy / "runs").iterdir())[0]
    if fault == "damaged":
        (spoilt / "outputs.safetensors").write_bytes(b"nothing")
    else:
        for name in ("result.json", "model.json", "model.safetensors", "outputs.safetensors"):
            (spoilt / name).unlink()
    result = run("compare", str(copy), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert sum(row["seeds"] for row in found["rows"]) == 15
    assert spoilt.name in str(found["notes"])
    alone = run("compare", str(spoilt))
    assert alone.exit_code == 5
    assert last_error(alone).startswith("error: ")


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--x", "ensemble.members"],
        ["--rows", "accuracy,nll"],
        ["--by", "model.hidden"],
        ["--by", "method.name"],
    ],
    ids=["λ", "another x", "rows", "no λ", "methods only"],
)
def test_a_figure_is_drawn_whatever_is_compared(sweep, tmp_path, options):
    for ending in ("svg", "png"):
        file = tmp_path / f"figure.{ending}"
        result = run("compare", str(sweep), "--plot", str(file), *options)
        assert result.exit_code == 0, result.stderr
        assert file.stat().st_size > 1000


def test_the_figure_shows_the_measures_and_every_model(sweep, tmp_path):
    file = ek.compare(sweep).plot(tmp_path / "figure.svg")
    text = Path(file).read_text(encoding="utf-8")
    for part in ("hidden=[4]", "hidden=[8]", "diversity", "training loss", "bagging", "λ"):
        assert part in text


def test_names_are_text_in_every_form(tmp_path):
    hostile = ek.load_spec(SPEC | {"model": {"name": "mlp", "hidden": [4]}})
    paths = [ek.train(hostile, tmp_path / f"<b>&_%{seed}", progress=False).path for seed in (1, 2)]
    page = ek.compare(paths, by="seed")._repr_html_()
    assert "<b>&_%" not in page
    latex = run("compare", *map(str, paths), "--by", "training.batch_size", "--latex").stdout
    assert "batch\\_size" in latex
