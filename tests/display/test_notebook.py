"""Notebooks: one display that is updated in place, and results that have an HTML form."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.small_runs import Crash, CrashAfter, small_spec
from helpers.tiny_runs import SPEC

import ensemblekit as ek
from ensemblekit.core.html_tables import html_table
from ensemblekit.display.notebook import SHOWN_EPOCHS, NotebookProgress, in_notebook
from ensemblekit.display.progress import choose_progress

ELEMENTS = [
    "div",
    "details",
    "summary",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "pre",
    "progress",
    "code",
]


class Cells(HTMLParser):
    """The texts of a page, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in ELEMENTS
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, str]]]:
    """What was displayed, in a process that looks like a kernel."""
    messages: list[tuple[str, str, dict[str, str]]] = []
    package, module = ModuleType("IPython"), ModuleType("IPython.display")

    def record(kind: str) -> Any:
        return lambda page, raw, display_id: messages.append((kind, display_id, page))

    module.display, module.update_display = record("display"), record("update")  # type: ignore[attr-defined]
    shell = ModuleType("shell")
    shell.kernel = object()  # type: ignore[attr-defined]
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return messages


def test_a_run_in_a_notebook_has_one_display_which_is_updated(tmp_path, shown, capsys):
    run = ek.train(SPEC, tmp_path / "run")
    kinds = [kind for kind, _, _ in shown]
    assert kinds[0] == "display"
    assert set(kinds[1:]) == {"update"}
    assert len({identifier for _, identifier, _ in shown}) == 1
    assert capsys.readouterr().out == ""
    page = shown[-1][2]
    texts = Cells(page["text/html"]).texts
    assert "finished" in "".join(texts)
    assert "gncl" in "".join(texts)
    assert "epoch 3/3" in page["text/html"]
    assert 'value="6" max="6"' in page["text/html"]  # 2 steps in each of 3 epochs
    assert str(run.path) in texts
    assert f"the run is in {run.path}" in page["text/plain"]
    assert "epoch 3/3" in page["text/plain"]


def test_many_epochs_stay_short_and_an_end_is_said(tmp_path, shown):
    spec = small_spec(training={"epochs": SHOWN_EPOCHS + 4, "batch_size": 200})
    ek.train(spec, tmp_path / "run")
    assert "earlier lines" in shown[-1][2]["text/html"]
    display = NotebookProgress()
    display.run_started(ek.load_spec(SPEC), tmp_path, [("<b>", "\x1b[31m")])
    display.run_ended("interrupted", {}, [], {})
    page = shown[-1][2]["text/html"]
    assert "interrupted" in page
    assert "<b>" not in page
    assert "\x1b" not in page


def test_a_display_that_fails_does_not_end_the_run(tmp_path, shown):
    sys.modules["IPython.display"].display = None  # type: ignore[attr-defined]
    assert ek.train(SPEC, tmp_path / "run").status == "finished"


def test_only_a_kernel_is_a_notebook(shown, monkeypatch):
    assert in_notebook()
    assert isinstance(choose_progress(quiet=False), NotebookProgress)
    assert not isinstance(choose_progress(quiet=True), NotebookProgress)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)  # IPython is imported, but not running
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_a_run_has_an_html_form(tmp_path):
    run = ek.train(SPEC, tmp_path / "<script>", progress=False)
    page = run._repr_html_()
    texts = Cells(page).texts
    for text in ("finished", "gncl", "mlp", "digits", "2", f"{run.metrics['test_accuracy']:.6g}"):
        assert text in texts
    assert "<script>" not in page
    assert f"run {tmp_path / '<script>'}" in texts
    with pytest.raises(Crash):
        ek.train(SPEC, tmp_path / "failed", progress=CrashAfter(1, 1))
    assert any("failed" in text for text in Cells(ek.open_run(tmp_path / "failed")._repr_html_()).texts)


def test_a_decomposition_has_an_html_form():
    parts = ek.decompose(torch.randn(3, 5, 4), torch.arange(5) % 4)
    texts = Cells(parts._repr_html_()).texts
    for term in (parts.ensemble_loss, parts.mean_member_loss, parts.diversity, parts.remainder, parts.remainder_bound):
        assert f"{float(term):.6g}" in texts
    on_meta = ek.decompose(torch.randn(3, 5, 1, device="meta"), torch.randn(5, 1, device="meta"), "mse")
    assert "diversity" in on_meta._repr_html_()


def test_texts_of_tables_are_escaped():
    page = html_table([("<img src=x>", 'a"b&'), ("\x1b[31m", 1)], ["<i>", "x"], caption="</table>")
    assert Cells(page).texts[:5] == ["</table>", "<i>", "x", "<img src=x>", 'a"b&']
    assert "<img" not in page
    assert "\x1b" not in page


@pytest.mark.slow
def test_a_real_kernel_shows_one_display_and_the_html_of_a_run(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbformat = pytest.importorskip("nbformat")
    code = f"import ensemblekit as ek\nrun = ek.train({SPEC!r}, {str(Path(tmp_path, 'run'))!r})"
    cells = [nbformat.v4.new_code_cell(text) for text in (code, "run")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    train, result = (cell.outputs for cell in notebook.cells)
    assert [output.output_type for output in train] == ["display_data"]
    assert "finished" in train[0].data["text/html"]  # updated in place up to the end
    assert "epoch 3/3" in train[0].data["text/html"]
    assert "<table>" in result[0].data["text/html"]
    assert result[0].data["text/plain"].startswith("Run(")
