"""Metrics of plugins: against scikit-learn, in every result of a run, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from ensemblekit_metrics.macro_f1 import MacroF1
from ensemblekit_metrics.median_absolute_error import MedianAbsoluteError
from ensemblekit_metrics.top_k_accuracy import TopKAccuracy
from sklearn import metrics as reference

import ensemblekit as ek
from ensemblekit.core.errors import NumericError, PluginError, SpecError
from ensemblekit.core.losses import MSE, CrossEntropy
from ensemblekit.core.metrics import evaluate
from ensemblekit.core.registry import discover
from ensemblekit.spec.reader import load_spec

SPEC = {
    "metrics": ["macro_f1", {"name": "top_k_accuracy", "k": 2}],
    "data": {"name": "digits", "limit_train": 200, "limit_test": 100},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "gncl"},
    "ensemble": {"members": 2},
    "training": {"epochs": 2, "batch_size": 32},
    "engine": {"name": "sequential", "device": "cpu"},
}


def samples(classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 200, classes, generator=generator), torch.randint(classes, (200,), generator=generator)


def test_macro_f1_is_that_of_scikit_learn():
    outputs, target = samples()
    value = MacroF1().compute(outputs, outputs[0], target, CrossEntropy())
    assert float(value) == pytest.approx(reference.f1_score(target, outputs[0].argmax(dim=-1), average="macro"))
    # classes that nobody knows are left out, as scikit-learn leaves out labels that do not occur
    few = target % 2
    narrow = outputs[0] + torch.tensor([9.0, 9.0, 0.0, 0.0])
    expected = reference.f1_score(few, narrow.argmax(dim=-1), average="macro")
    assert float(MacroF1().compute(outputs, narrow, few, CrossEntropy())) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_accuracy_is_that_of_scikit_learn(k):
    outputs, target = samples()
    value = TopKAccuracy(k=k).compute(outputs, outputs[0], target, CrossEntropy())
    assert float(value) == pytest.approx(reference.top_k_accuracy_score(target, outputs[0], k=k))


def test_the_median_absolute_error_is_that_of_scikit_learn_in_the_original_units():
    outputs, _ = samples(classes=1)
    target = torch.randn(200, 1)
    value = evaluate(outputs, target, MSE(), None, lambda values: 7 * values + 3, [MedianAbsoluteError()])
    expected = reference.median_absolute_error(7 * target.double() + 3, 7 * outputs.double().mean(dim=0) + 3)
    assert value["median_absolute_error"] == pytest.approx(expected, rel=1e-5)


def test_results_history_evaluation_and_comparison_have_the_metrics_of_a_spec(tmp_path):
    run = ek.train(SPEC, tmp_path / "one", progress=False)
    value = run.metrics["test_top_k_accuracy"]
    assert run.metrics["test_accuracy"] <= value <= 1
    rows = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert {"test_macro_f1", "validation_macro_f1", "test_top_k_accuracy"} <= rows[-1].keys()
    result = json.loads((tmp_path / "one" / "result.json").read_text())
    assert result["metrics"]["test_top_k_accuracy"] == value
    assert ek.evaluate_run(tmp_path / "one")["test_top_k_accuracy"] == pytest.approx(value)
    assert run.combiner().metrics(run.outputs("test"))["top_k_accuracy"] == pytest.approx(value)
    ek.train({**SPEC, "method": {"name": "independent"}}, tmp_path / "two", progress=False)
    comparison = ek.compare([tmp_path / "one", tmp_path / "two"])
    table = comparison.table()
    assert value in [pytest.approx(row["top_k_accuracy"]) for row in table]
    assert {"macro_f1", "top_k_accuracy"} <= set(comparison.columns)
    assert run.metrics["test_aurc"] in [
        row["aurc"] for row in table
    ]  # a metric of the run that is no mean over samples
    assert min(comparison.groups, key=lambda group: group.cells["aurc"].mean).cells["aurc"].is_leading
    leading = max(comparison.groups, key=lambda group: group.cells["macro_f1"].mean)
    assert leading.cells["macro_f1"].is_leading
    assert "macro f1" in comparison._repr_html_()


@pytest.mark.parametrize(
    ("metrics", "path", "what"),
    [
        (["macro_f1", "macro_f1"], "metrics", "listed twice"),
        (["median_absolute_error"], "metrics.0", 'the task of "digits" is classification'),
        ([{"name": "top_k_accuracy", "k": 11}], "metrics.0.k", "only 10 classes"),
        (["macro_f2"], "metrics.0.name", "not a registered metric"),
    ],
)
def test_metrics_that_cannot_be_used_are_errors_before_training(metrics, path, what):
    with pytest.raises(SpecError) as caught:
        load_spec({**SPEC, "metrics": metrics}, None, discover())
    assert {problem.path: problem.what for problem in caught.value.problems}.keys() == {path}
    assert what in caught.value.problems[0].what


def test_the_name_of_a_built_in_metric_is_refused():
    class Accuracy(ek.Metric):
        """Another accuracy."""

        def compute(self, outputs, combined, target, loss):
            return 1.0

    with pytest.raises(SpecError, match='"accuracy" is also the name of a built-in metric'):
        load_spec({**SPEC, "metrics": ["accuracy"]}, None, discover().with_classes([Accuracy]))


def test_wrong_results_of_a_metric_are_named():
    class PerSample(ek.Metric):
        """Forgets the mean."""

        def compute(self, outputs, combined, target, loss):
            return loss(combined, target)

    class Undefined(ek.Metric):
        """Divides by zero."""

        def compute(self, outputs, combined, target, loss):
            return float("nan")

    outputs, target = samples()
    with pytest.raises(PluginError, match=r"(?s)compute\(\) returned a tensor of shape \(200,\).*per_sample"):
        evaluate(outputs, target, CrossEntropy(), extra=[PerSample()])
    with pytest.raises(NumericError, match='the metric "undefined" is nan'):
        evaluate(outputs, target, CrossEntropy(), extra=[Undefined()])
