"""The risk at each coverage, against a computation sample by sample and against the mean over random orders of ties."""

from __future__ import annotations

import pytest
import torch

from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.metrics import evaluate
from ensemblekit.core.selective_prediction import RiskCoverage


def samples(seed: int, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(60, generator=generator, dtype=torch.float64)
    wrong = torch.rand(60, generator=generator) > confidence
    return (confidence.mul(5).round() if ties else confidence), wrong


def naive_risks(confidence: list[float], wrong: list[bool]) -> list[float]:
    order = sorted(range(len(confidence)), key=lambda sample: -confidence[sample])
    return [sum(wrong[sample] for sample in order[:count]) / count for count in range(1, len(order) + 1)]


def test_risks_are_the_shares_of_errors_among_the_most_confident():
    confidence, wrong = samples(0, ties=False)
    expected = naive_risks(confidence.tolist(), wrong.tolist())
    curve = RiskCoverage.of(confidence, wrong)
    assert curve.risk.tolist() == pytest.approx(expected)
    assert float(curve.area) == pytest.approx(sum(expected) / 60)
    assert float(curve.risk_at(0.8)) == pytest.approx(expected[47])
    assert float(curve.risk_at(1.0)) == pytest.approx(float(wrong.double().mean()))
    allowed = [count for count, risk in enumerate(expected, start=1) if risk <= 0.2]
    assert float(curve.coverage_at(0.2)) == pytest.approx(max(allowed) / 60)


def test_ties_count_with_their_mean_over_random_orders():
    confidence, wrong = samples(1, ties=True)
    curve = RiskCoverage.of(confidence, wrong)
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros(60, dtype=torch.float64)
    repeats = 3000
    for _ in range(repeats):
        order = torch.randperm(60, generator=generator)
        total += torch.tensor(naive_risks(confidence[order].tolist(), wrong[order].tolist()), dtype=torch.float64)
    torch.testing.assert_close(curve.risk, total / repeats, atol=0.03, rtol=0)
    flipped = RiskCoverage.of(confidence.flip(0), wrong.flip(0))
    torch.testing.assert_close(flipped.risk, curve.risk)


def test_a_coverage_at_a_risk_is_one_that_a_threshold_can_reach():
    # three samples of equal confidence: two right and one wrong
    curve = RiskCoverage.of(torch.tensor([0.9, 0.5, 0.5, 0.5]), torch.tensor([False, False, False, True]))
    assert curve.is_threshold.tolist() == [True, False, False, True]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 6, 2 / 9, 1 / 4])
    assert float(curve.coverage_at(0.24)) == 0.25
    assert float(curve.coverage_at(0.25)) == 1
    assert float(RiskCoverage.of(torch.tensor([0.5]), torch.tensor([True])).coverage_at(0.05)) == 0


def test_metrics_of_classes_have_the_area_the_coverage_and_the_risk():
    generator = torch.Generator().manual_seed(0)
    outputs, target = torch.randn(3, 200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    outputs = outputs + 3 * torch.nn.functional.one_hot(target, 4)
    metrics = evaluate(outputs, target, CrossEntropy())
    probabilities = outputs.double().mean(dim=0).softmax(dim=-1)
    confidence, predicted = probabilities.max(dim=-1)
    risks = naive_risks(confidence.tolist(), (predicted != target).tolist())
    assert metrics["aurc"] == pytest.approx(sum(risks) / 200)
    assert metrics["risk_at_80_coverage"] == pytest.approx(risks[159])
    assert metrics["coverage_at_5_risk"] == max(n for n, risk in enumerate(risks, 1) if risk <= 0.05) / 200
