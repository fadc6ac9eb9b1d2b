"""The page of a report as text: complete, escaped, accessible, and the same each time."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from helpers import tiny_runs
from helpers.odd_tables import COLUMN, NAMES, train_on_odd_table
from markupsafe import escape

import ensemblekit as ek
from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import cell_text, number, percent
from ensemblekit.inference import kept_outputs, loading

HEADINGS = (
    "Loss over the epochs",
    "Accuracy over the epochs",
    "Decomposition of the loss",
    "Members against the ensemble",
    "Pairwise disagreement",
    "Correlation of errors",
    "Accuracy against the number of members",
    "Loss against the number of members",
    "Reliability diagram",
    "Risk–coverage curve",
    "Uncertainty of right and wrong predictions",
    "Confusion matrix",
    "Accuracy of each class",
    "Most uncertain",
    "Most confidently wrong",
    "Most contested",
    "Time spent",
    "Environment",
    "Repeat it",
)
VOID = {"meta", "img", "br", "input", "hr", "link"}


class Document(HTMLParser):
    """The elements of a page, and whether they are nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self.feed(text)
        self.problems += self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}>")

    def all(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_runs.train(tmp_path_factory.mktemp("report") / "digits")


@pytest.fixture(scope="module")
def text(run):
    return ek.report(run.path).read_text()


def test_a_run_has_every_part_of_the_report(run, text):
    for heading in HEADINGS:
        assert re.search(rf"<h3[^>]*>{heading}</h3>", text), heading
    accuracy = f"{100 * run.metrics['test_accuracy']:.2f}\N{NO-BREAK SPACE}%"
    assert f"2 mlp members trained on digits with gncl for 3 epochs reach {accuracy} test accuracy" in text
    assert f"ensemblekit train {run.path}/spec.toml" in text
    assert "lambda = " in text  # the spec itself
    assert len(text) < 1_000_000


def test_the_page_is_well_formed_and_refers_to_nothing_outside(text):
    document = Document(text)
    assert document.problems == []
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in document.elements:
        for name in ("src", "href", "xlink:href"):
            if (value := attributes.get(name)) is not None:
                assert value.startswith(("#", "data:image/png;base64,")), value
                assert not value.startswith("#") or value[1:] in ids, value
    assert re.findall(r"url\((?!#)", text) == []
    assert re.findall(r"@import|<link|<iframe|<object", text) == []


def test_the_policy_allows_only_the_pages_own_script(text):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)


def test_every_figure_has_a_text_alternative_and_its_data(text):
    figures = re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)
    assert len(figures) == 13
    for figure in figures:
        (label,) = re.findall(r'<svg[^>]*role="img" aria-label="([^"]+)"', figure)
        assert len(label) > 30
        assert "<title>" in figure
        assert "<desc>" in figure
        assert figure.count("<table") == 1
        assert figure.count("<td>") >= 3
    document = Document(text)
    assert document.all("html")[0]["lang"] == "en"
    assert [len(document.all(tag)) for tag in ("main", "header", "h1")] == [1, 1, 1]
    assert all(image.get("alt") for image in document.all("img"))


def test_colours_follow_the_theme(text):
    svg = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "currentColor" in svg
    assert "var(--series-0)" in svg
    for colour in (*drawing.SERIES, "#000000", drawing.FOREGROUND):
        assert colour not in svg


def test_the_same_run_gives_the_same_page(run, text, tmp_path):
    assert ek.report(run.path, output=tmp_path / "again.html").read_text() == text


def test_test_images_are_embedded(text):
    pictures = re.findall(r'<img src="data:image/png;base64,([A-Za-z0-9+/=]+)"', text)
    assert len(pictures) >= 6


def test_no_network_is_built_or_computed(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a network was loaded")

    monkeypatch.setattr(loading, "load_ensemble", refuse)
    monkeypatch.setattr(kept_outputs, "load_ensemble", refuse)
    assert ek.report(run.path, output=tmp_path / "report.html").exists()


def test_names_from_data_are_text(tmp_path):
    run = train_on_odd_table(tmp_path)
    page = ek.report(run.path).read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page
    assert "\\x1b[31mred" in page
    assert "100 $ &amp; more $" in page
    assert COLUMN not in page
    assert "<dt>&lt;b&gt;width&lt;/b&gt;</dt>" in page  # rows of the table, in its own columns
    assert Document(page).problems == []
    assert len(NAMES) == 4


def test_data_that_is_gone_is_said_and_the_samples_are_still_listed(tmp_path):
    run = train_on_odd_table(tmp_path)
    (tmp_path / "table.csv").unlink()
    page = ek.report(run.path).read_text()
    assert "shown without their inputs, because the test data cannot be loaded" in page
    assert "Most uncertain" in page
    assert "<summary>Row</summary>" not in page


def test_data_that_has_changed_is_not_shown(tmp_path):
    run = train_on_odd_table(tmp_path)
    file = tmp_path / "table.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    assert "the data is not what the run was started with" in ek.report(run.path).read_text()


def test_an_unfinished_run_shows_what_is_known(tmp_path):
    tiny_runs.train_until(tmp_path / "run", 3)
    page = ek.report(tmp_path / "run").read_text()
    assert "the run is" in page
    assert "Loss over the epochs" in page
    assert "Reliability diagram" not in page
    assert Document(page).problems == []


def test_a_run_without_kept_outputs_is_evaluated_once(tmp_path):
    run = tiny_runs.train(tmp_path / "run", keep_outputs=False)
    assert "Reliability diagram" in ek.report(run.path).read_text()


def test_outputs_that_are_gone_with_their_data_leave_the_recorded_metrics(tmp_path):
    run = train_on_odd_table(tmp_path)
    moved = tmp_path / "moved"
    spec = run.spec.to_toml().replace("keep_outputs = true", "keep_outputs = false")
    (tmp_path / "spec.toml").write_text(spec)
    ek.train(tmp_path / "spec.toml", moved, progress=False)
    (tmp_path / "table.csv").unlink()
    page = ek.report(moved).read_text()
    assert "Only the recorded metrics are shown" in page
    assert "Reliability diagram" not in page


def test_a_single_network_has_no_pairs_and_no_size_curves(tmp_path):
    spec = {**tiny_runs.SPEC, "ensemble": {"members": 1}, "method": "independent"}
    run = ek.train(spec, tmp_path / "run", progress=False)
    page = ek.report(run.path).read_text()
    assert "Pairwise disagreement" not in page
    assert "against the number of members" not in page
    assert "Members against the ensemble" in page
    assert Document(page).problems == []


@pytest.mark.parametrize("method", ["stacking", {"name": "dropout", "passes": 3}, "boosting", "smcl"])
def test_every_way_of_combining_members_has_a_report(method, tmp_path):
    model = {"name": "mlp", "hidden": [3], "batch_norm": False, "dropout": 0.2}
    run = ek.train({**tiny_runs.SPEC, "model": model, "method": method}, tmp_path / "run", progress=False)
    page = ek.report(run.path).read_text()
    assert "Reliability diagram" in page
    assert ("The combination was fitted for all members" in page) == (method == "stacking")


def test_regression_has_its_own_figures(tmp_path):
    spec = {
        "data": {"name": "diabetes"},
        "model": {"name": "mlp", "hidden": [4]},
        "ensemble": {"members": 3},
        "training": {"epochs": 2, "loss": "mse"},
        "engine": {"name": "sequential"},
    }
    run = ek.train(spec, tmp_path / "run", progress=False)
    page = ek.report(run.path).read_text()
    for heading in (
        "Mean squared error over the epochs",
        "Mean squared error against the number of members",
        "Predicted against true values",
        "Residuals",
        "Members&#39; spread against the error",
        "Largest errors",
    ):
        assert f">{heading}</h3>" in page, heading
    assert number(run.metrics["test_mse"]) in page
    assert "Confusion matrix" not in page
    assert Document(page).problems == []


def test_a_run_that_was_moved_has_a_report_of_its_new_place(run, tmp_path):
    moved = tmp_path / "a <b> & c"
    shutil.copytree(run.path, moved)
    page = ek.report(moved).read_text()
    assert "<h1>a &lt;b&gt; &amp; c</h1>" in page
    assert "ensemblekit train &#39;" in page  # quoted for the shell


def test_numbers_are_short():
    assert [number(value) for value in (0.0, 0.123456, 12345.6, 1e-7, float("nan"), 1e9)] == [
        "0",
        "0.1235",
        "12346",
        "1e-07",
        "–",
        "1e+09",
    ]
    assert [cell_text(value) for value in (None, True, 12345, 0.5, "x")] == ["–", "yes", "12,345", "0.5", "x"]
    assert percent(0.12345) == "12.35\N{NO-BREAK SPACE}%"


def test_a_sweep_has_the_comparison_the_figure_and_a_link_to_every_run(tmp_path):
    spec = {**tiny_runs.SPEC, "method": {"name": "gncl", "lambda": 0.5}}
    ek.sweep(spec, grid={"method.lambda": [0, 1]}, out=tmp_path / "sweep", progress=False)
    page = ek.report(tmp_path / "sweep").read_text()
    assert Document(page).problems == []
    assert "A sweep of 2 runs (2 finished)" in page
    assert 'id="comparison-figure"' in page
    links = [unquote(link["href"]) for link in Document(page).all("a") if link["href"].startswith("./")]
    assert len(links) == 2
    assert all((tmp_path / "sweep" / link / "run.json").is_file() for link in links)


def test_advice_is_shown_with_its_rule_and_source(run, text):
    given = ek.compare([run.path]).advice
    assert ('id="advice"' in text) == bool(given)
    assert all(escape(each.rule) in text and escape(each.source) in text for each in given)
