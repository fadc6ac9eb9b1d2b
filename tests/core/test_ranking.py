"""Areas under curves and false positives at a recall, against scikit-learn, with ties."""

from __future__ import annotations

import pytest
import torch
from sklearn import metrics as reference

import ensemblekit as ek
from ensemblekit.core.ranking import auroc, average_precision, false_positive_rate


def samples(seed: int, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(300, generator=generator, dtype=torch.float64)
    positive = torch.rand(300, generator=generator) < 0.3
    scores = scores + positive
    return (scores.round() if ties else scores), positive


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_areas_are_those_of_scikit_learn(seed, ties):
    scores, positive = samples(seed, ties)
    assert float(auroc(scores, positive)) == pytest.approx(reference.roc_auc_score(positive, scores), rel=1e-12)
    expected = reference.average_precision_score(positive, scores)
    assert float(average_precision(scores, positive)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("recall", [0.5, 0.95, 1.0])
def test_false_positives_are_those_of_scikit_learns_curve(recall, ties):
    scores, positive = samples(7, ties)
    false_rates, recalls, _ = reference.roc_curve(positive, scores, drop_intermediate=False)
    expected = false_rates[recalls >= recall - 1e-12].min()
    assert float(false_positive_rate(scores, positive, recall)) == pytest.approx(expected, rel=1e-12)


def test_equal_scores_separate_nothing_and_perfect_ones_everything():
    positive = torch.tensor([True, False, True, False, False])
    assert float(auroc(torch.zeros(5), positive)) == 0.5
    assert float(average_precision(torch.zeros(5), positive)) == pytest.approx(0.4)
    assert float(false_positive_rate(torch.zeros(5), positive)) == 1
    assert float(auroc(positive.float(), positive)) == 1
    assert float(false_positive_rate(positive.float(), positive)) == 0


def test_the_areas_are_public():
    scores, positive = samples(0, ties=False)
    assert ek.auroc(scores, positive) == auroc(scores, positive)
    assert ek.average_precision(scores, positive) == average_precision(scores, positive)
