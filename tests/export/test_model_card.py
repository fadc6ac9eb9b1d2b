"""The model card: hubs can read it, its figures are right, and hostile names are nothing but text in it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.model_folders import NAMES, SPEC, samples, train
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from sklearn.metrics import accuracy_score, log_loss

import ensemblekit as ek
from ensemblekit.core.streams import printable
from ensemblekit.export.front_matter import licence_fields
from ensemblekit.export.markdown import code_block, inline
from ensemblekit.export.markdown import yaml as to_yaml

MARKDOWN = MarkdownIt("js-default", {"html": True})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ek.Run:
    path = tmp_path_factory.mktemp("card") / "run"
    train(path)
    return ek.open_run(path)


@pytest.fixture(scope="module")
def card(run) -> str:
    return (ek.export(run.path, "hub", licence="Apache-2.0").path / "README.md").read_text(encoding="utf-8")


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def body(card: str) -> str:
    return card.split("---\n", 2)[2]


def texts(markdown: str) -> list[str]:
    """The text of every paragraph, heading and cell; anything but text, emphasis and code is an error."""
    found = []
    for token in MARKDOWN.parse(markdown):
        assert token.type not in ("html_block", "html_inline"), token.content
        if token.type == "inline":
            kinds = {child.type for child in token.children or []}
            assert kinds <= {"text", "softbreak", "text_special", "code_inline"}, (kinds, token.content)
            found.append("".join(child.content for child in token.children or []))
    return found


def row(card: str, label: str) -> list[str]:
    cells = next(line for line in body(card).splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in cells.strip("|").split(" | ")]


def test_hubs_find_their_fields(card, run):
    data = front_matter(card)
    assert data["library_name"] == "ensemblekit"
    assert data["pipeline_tag"] == "tabular-classification"
    assert data["license"] == "apache-2.0"
    assert {"ensemble", "mlp"} <= set(data["tags"])
    result = data["model-index"][0]["results"][0]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    kept = run.outputs("test")
    probabilities = run.combiner().probabilities(kept.outputs).numpy()
    assert set(values) == {"accuracy", "nll", "ece", "brier", "coverage"}
    assert values["accuracy"] == accuracy_score(kept.targets, probabilities.argmax(axis=1))
    assert values["nll"] == pytest.approx(log_loss(kept.targets, probabilities), rel=1e-4)


def test_the_parser_of_a_hub_reads_the_card(card):
    hub = pytest.importorskip("huggingface_hub", reason="the parser of a model hub")
    parsed = hub.ModelCard(card)
    assert parsed.data.license == "apache-2.0"
    assert [result.metric_type for result in parsed.data.eval_results][:2] == ["accuracy", "nll"]
    assert parsed.text.strip().startswith("# run")


def test_figures_and_their_intervals_are_right(card, run):
    _, value, interval = row(card, "accuracy")
    kept = run.outputs("test")
    correct = (kept.outputs.mean(dim=0).argmax(dim=-1) == kept.targets).double().numpy()
    share = correct.mean()
    assert value == f"{100 * share:.2f}\N{NO-BREAK SPACE}%"
    low, high = (float(end) / 100 for end in re.findall(r"[\d.]+", interval))
    deviation = math.sqrt(share * (1 - share) / len(correct))
    assert low == pytest.approx(share - 1.96 * deviation, abs=0.25 * deviation)
    assert high == pytest.approx(share + 1.96 * deviation, abs=0.25 * deviation)


def test_the_decomposition_adds_up_and_is_that_of_the_outputs(card, run):
    header = "| ensemble loss | = mean member loss | − diversity | + remainder |\n|---|---|---|---|\n"
    numbers = [float(cell) for cell in body(card).partition(header)[2].splitlines()[0].strip("| ").split(" | ")]
    kept = run.outputs("test")
    terms = ek.decompose(kept.outputs, kept.targets)
    expected = terms.ensemble_loss, terms.mean_member_loss, terms.diversity, terms.remainder
    assert numbers == pytest.approx([float(term) for term in expected], rel=1e-2)
    assert numbers[0] == pytest.approx(numbers[1] - numbers[2] + numbers[3], abs=2e-3)


def test_the_weakest_classes_are_listed(card, run):
    kept = run.outputs("test")
    predicted = kept.outputs.mean(dim=0).argmax(dim=-1)
    names = ek.load(run.path).classes
    recalls = {
        name: float((predicted[kept.targets == index] == index).double().mean()) for index, name in enumerate(names)
    }
    weakest = min(recalls, key=recalls.__getitem__)
    first = body(card).partition("| most often taken for |\n|---|---|---|---|\n")[2].splitlines()[0]
    assert first.startswith(f"| {inline(weakest)} |")


def test_hostile_names_are_shown_as_text(card):
    shown = texts(body(card))
    predicts = next(text for text in shown if text.startswith(f"{len(NAMES)} classes: "))
    for name in NAMES:
        assert printable(name) in predicts
        assert printable(name) not in str(front_matter(card))
    headings = [line for line in body(card).splitlines() if line.startswith("#")]
    assert headings == ["# run"] + [f"## {title}" for title in SECTIONS]


SECTIONS = (
    "How to load",
    "Task",
    "Data",
    "Results",
    "Decomposition of the loss",
    "Calibration",
    "Intended use",
    "Limitations",
    "Training",
    "Environment",
    "Licence",
)


def test_the_card_states_what_was_added_and_what_is_not_known(card):
    text = body(card)
    assert "Calibrated after training: temperature" in text
    assert "hold the truth with a probability of at least 0.8" in text
    assert "Not known, because a run does not record it" in text
    assert "test samples are few" in text
    assert text.rstrip().endswith("Apache-2.0.")


def test_the_lines_that_load_the_model_run_as_they_are(card, run, monkeypatch):
    monkeypatch.chdir(run.path / "hub")
    code = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)[1]
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert namespace["probabilities"].shape == (1, len(NAMES))
    assert namespace["classes"][0] in NAMES


def test_a_regression_has_its_own_figures(tmp_path):
    inputs = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    spec = {"model": {"name": "mlp", "hidden": [2]}, "ensemble": {"members": 2}, "training": {"epochs": 1}}
    ek.train(spec, tmp_path / "run", progress=False, data=(inputs, inputs.sum(axis=1)))
    card = Path(ek.export(tmp_path / "run", "hub").path / "README.md").read_text()
    data = front_matter(card)
    assert data["pipeline_tag"] == "tabular-regression"
    assert data["metrics"] == ["mse", "rmse", "r2"]
    assert "license" not in data
    assert "datasets" not in data
    assert body(card).rstrip().endswith("Not stated.")
    assert texts(body(card))


def test_without_kept_outputs_the_card_has_the_recorded_metrics(tmp_path):
    spec = {**SPEC, "training": {"epochs": 1, "keep_outputs": False}}
    run = ek.train(spec, tmp_path / "run", progress=False, data=samples())
    folder = ek.export(tmp_path / "run", "hub", tmp_path / "without").path
    card = (folder / "README.md").read_text()
    assert "There are no intervals" in card
    assert row(card, "accuracy") == ["accuracy", f"{100 * run.metrics['test_accuracy']:.2f}\N{NO-BREAK SPACE}%"]
    folder = ek.export(tmp_path / "run", "hub", tmp_path / "with", data=samples()).path
    assert len(row((folder / "README.md").read_text(), "accuracy")) == 3


@pytest.mark.parametrize(
    ("licence", "fields"),
    [
        (None, {}),
        ("MIT", {"license": "mit"}),
        ("CC BY 4.0", {"license": "cc-by-4.0"}),
        ("Acme 1", {"license": "other", "license_name": "acme-1"}),
    ],
)
def test_licences_have_the_identifiers_of_hubs(licence, fields):
    assert licence_fields(licence) == fields


PLAIN = st.text(max_size=30) | st.sampled_from(NAMES)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        PLAIN | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
        ),
        max_leaves=8,
    )
)
@example({"a": [["\ufeff\uffff\u2028", 1e-05], {"b": [{"c": "no"}]}]})
def test_front_matter_is_read_back_as_it_was_written(value):
    def visible(part: Any) -> Any:
        if isinstance(part, str):
            return printable(part)
        if isinstance(part, list):
            return [visible(item) for item in part]
        return {key: visible(item) for key, item in part.items()} if isinstance(part, dict) else part

    assert yaml.safe_load(to_yaml({"key": value})) == {"key": visible(value)}


@settings(max_examples=60, deadline=None)
@given(PLAIN)
@example("www.example.com https://example.com :smile: __init__ a_b <b>")
def test_any_name_in_a_cell_is_shown_as_it_is(name):
    cells = texts(f"| a |\n|---|\n| x{inline(name)}x |\n")
    assert [" ".join(cell.split()) for cell in cells] == ["a", " ".join(f"x{printable(name)}x".split())]


def test_a_block_of_code_cannot_be_left():
    block = code_block("a\n```\n# not a heading\n````", "toml")
    tokens = MARKDOWN.parse(block)
    assert [token.type for token in tokens] == ["fence"]
    assert tokens[0].content == "a\n```\n# not a heading\n````\n"
