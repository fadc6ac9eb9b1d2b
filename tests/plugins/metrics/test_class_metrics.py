"""Metrics of classes: against scikit-learn or a computation by loops, with ties, missing classes and one class only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ensemblekit_metrics.adaptive_ece import AdaptiveECE
from ensemblekit_metrics.auroc import AUROC
from ensemblekit_metrics.average_precision import AveragePrecision
from ensemblekit_metrics.balanced_accuracy import BalancedAccuracy
from ensemblekit_metrics.classwise_ece import ClasswiseECE
from ensemblekit_metrics.top_k_accuracy import TopKAccuracy
from ensemblekit_metrics.weighted_f1 import WeightedF1
from sklearn import metrics as reference

import ensemblekit as ek
from ensemblekit.core.losses import CrossEntropy, Exponential
from ensemblekit.core.metrics import calibration_error, evaluate

CLASSES = 6
CASES = ["random", "ties", "missing classes", "two classes"]


def samples(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, C) and classes (N,)."""
    generator = torch.Generator().manual_seed(0)
    classes = 2 if case == "two classes" else CLASSES
    target = torch.randint(classes, (200,), generator=generator)
    logits = torch.randn(200, classes, generator=generator, dtype=torch.float64)
    if case == "missing classes":  # neither present nor ever predicted: 4; absent, but predicted: 5
        target, logits = target % 4, logits - 100 * torch.nn.functional.one_hot(torch.tensor(4), classes)
    logits = logits + torch.nn.functional.one_hot(target, classes)
    return (logits.round() if case == "ties" else logits), target


def value(metric: ek.Metric, logits: torch.Tensor, target: torch.Tensor) -> float:
    return float(metric.compute(logits[None], logits, target, CrossEntropy()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_accuracies_and_f1_are_those_of_scikit_learn(case):
    logits, target = samples(case)
    predicted = logits.softmax(dim=-1).argmax(dim=-1)
    expected = reference.balanced_accuracy_score(target, predicted)
    assert value(BalancedAccuracy(), logits, target) == pytest.approx(expected)
    expected = reference.f1_score(target, predicted, average="weighted")
    assert value(WeightedF1(), logits, target) == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES)
def test_areas_are_the_means_of_scikit_learns_over_the_classes_that_occur(case):
    logits, target = samples(case)
    probabilities = logits.softmax(dim=-1).numpy()
    present = np.unique(target)
    areas = [reference.roc_auc_score(target == label, probabilities[:, label]) for label in present]
    assert value(AUROC(), logits, target) == pytest.approx(np.mean(areas))
    precisions = [reference.average_precision_score(target == label, probabilities[:, label]) for label in present]
    assert value(AveragePrecision(), logits, target) == pytest.approx(np.mean(precisions))
    if case == "random":
        whole = reference.roc_auc_score(target, probabilities, multi_class="ovr", average="macro")
        assert value(AUROC(), logits, target) == pytest.approx(whole)


def test_a_metric_that_is_not_defined_for_the_samples_is_left_out():
    logits, target = samples("random")
    found = evaluate(logits[None], torch.zeros_like(target), CrossEntropy(), extra=[AUROC(), BalancedAccuracy()])
    names = {AUROC().name, BalancedAccuracy().name}
    assert names & found.keys() == {BalancedAccuracy().name}


def test_losses_of_margins_have_two_classes():
    generator = torch.Generator().manual_seed(0)
    outputs, target = torch.randn(2, 50, 1, generator=generator), torch.randint(2, (50,), generator=generator)
    found = evaluate(outputs, target, Exponential(), extra=[AUROC().named("auroc")])
    expected = reference.roc_auc_score(target, outputs.mean(dim=0).squeeze(-1))
    assert found["auroc"] == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bins", [1, 7, 15, 1000])
def test_the_adaptive_error_has_bins_of_equally_many_samples(case, bins):
    logits, target = samples(case)
    probabilities = logits.softmax(dim=-1)
    confidence, correct = probabilities.amax(dim=-1).numpy(), (probabilities.argmax(dim=-1) == target).numpy()
    gaps = correct - confidence
    mean_gaps = np.array([gaps[confidence == own].mean() for own in confidence])
    parts = np.array_split(mean_gaps[np.argsort(confidence)], min(bins, 200))
    expected = sum(abs(part.sum()) for part in parts) / 200
    assert value(AdaptiveECE(bins=bins), logits, target) == pytest.approx(expected, abs=1e-12)
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    again = value(AdaptiveECE(bins=bins), logits[shuffled], target[shuffled])
    assert again == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_classwise_error_is_the_mean_of_the_errors_of_each_class(case):
    logits, target = samples(case)
    probabilities = logits.softmax(dim=-1).numpy()
    total = 0.0
    for label in range(probabilities.shape[1]):
        own = probabilities[:, label]
        for low in np.arange(15) / 15:
            chosen = (own > low) & (own <= low + 1 / 15)
            total += abs(((target.numpy() == label) - own)[chosen].sum()) / 200
    assert value(ClasswiseECE(), logits, target) == pytest.approx(total / probabilities.shape[1], abs=1e-9)


def test_one_bin_of_either_kind_gives_the_difference_of_accuracy_and_confidence():
    logits, target = samples("random")
    expected = float(calibration_error(logits.softmax(dim=-1), target, bins=1))
    assert value(AdaptiveECE(bins=1), logits, target) == pytest.approx(expected)


def test_all_of_them_are_metrics_of_a_run(tmp_path):
    names = ["adaptive_ece", "auroc", "average_precision", "balanced_accuracy", "classwise_ece", "weighted_f1"]
    spec = {
        "metrics": [*names, "top_k_accuracy"],
        "data": {"name": "digits", "limit_train": 100, "limit_test": 60},
        "model": {"name": "mlp", "hidden": [4]},
        "ensemble": {"members": 2},
        "training": {"epochs": 1},
        "engine": {"name": "sequential"},
    }
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert {f"test_{name}" for name in names} <= run.metrics.keys()
    assert run.spec.metrics[-1] == TopKAccuracy(k=5).named("top_k_accuracy")
    kept = run.outputs("test")
    probabilities = run.combiner().probabilities(kept.outputs).numpy().astype(float)
    expected = reference.top_k_accuracy_score(kept.targets, probabilities, k=5)
    assert run.metrics["test_top_k_accuracy"] == pytest.approx(expected)
