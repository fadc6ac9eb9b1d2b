"""The notebooks of the documentation run as they are, and the outputs that they have stored are those of today."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.places import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "examples").glob("*.ipynb"))
LARGEST = 60_000
"""Bytes of a notebook: more is a figure that is too large, or an output that nobody reads."""


def outputs(notebook: Any) -> list[list[tuple[str, Any]]]:
    """What each cell has put out, without numbers and warnings, which may differ on another machine."""
    return [
        [described(output) for output in cell.get("outputs", []) if output.get("name") != "stderr"]
        for cell in notebook.cells
    ]


def described(output: Any) -> tuple[str, Any]:
    if output.output_type == "stream":
        lines = output.text.splitlines()
        return output.name, [re.split(r"[\d(]", line)[0].split() for line in lines]
    return output.output_type, sorted(output.data)


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["method-from-a-paper", "own-model-and-data", "quick-start"]
    index = (DOCS / "index.md").read_text()
    for path in NOTEBOOKS:
        assert f"(examples/{path.name})" in index
        assert f"\nexamples/{path.stem}\n" in index


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_stored_outputs_are_current(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    notebooks = importlib.import_module("notebooks")
    stored = nbformat.read(path, as_version=4)
    executed = notebooks.executed(path, tmp_path)
    assert outputs(executed) == outputs(stored), "run python docs/notebooks.py"
    assert nbformat.writes(notebooks.cleaned(stored)) == path.read_text().rstrip("\n"), "run python docs/notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_complete_small_and_of_no_machine(path):
    text = path.read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < LARGEST
    assert not re.search(r"/(tmp|home|root|Users|usr)/", text)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.get("name") == "stderr" for cell in code for output in cell.outputs)
    for cell in notebook.cells:
        for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", cell.source if cell.cell_type == "markdown" else ""):
            assert Path(path.parent, target).exists(), target
