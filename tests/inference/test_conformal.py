"""Prediction sets and intervals: scores by hand, the quantile, and the law of the coverage over random splits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ensemblekit.core.losses import pick
from ensemblekit.inference.conformal import (
    CLASS_SCORES,
    VALUE_SCORES,
    Conformal,
    at_least,
    class_scores,
    quantile,
    quantile_rank,
    uniform_by_input,
    uniform_by_position,
)
from ensemblekit.inference.coverage import Coverage

SPLITS, CALIBRATION, TEST = 200, 99, 400


def pool(num_samples: int, num_classes: int = 6) -> tuple[Tensor, Tensor]:
    """Probabilities (N, K) of a poor classifier, and the classes (N,)."""
    random = torch.Generator().manual_seed(0)
    classes = torch.randint(num_classes, (num_samples,), generator=random)
    logits = 1.5 * torch.nn.functional.one_hot(classes, num_classes)
    return (logits + torch.randn(num_samples, num_classes, generator=random)).double().softmax(dim=-1), classes


def test_the_scores_are_those_of_the_papers():
    probabilities = torch.tensor([[0.2, 0.5, 0.3]]).double()
    uniform = torch.tensor([0.25])
    aps = [0.8 + 0.25 * 0.2, 0.25 * 0.5, 0.5 + 0.25 * 0.3]
    expected = {
        "lac": [0.8, 0.5, 0.7],
        "aps": aps,
        "raps": [aps[0] + 0.1 * (3 - 1), aps[1], aps[2] + 0.1 * (2 - 1)],
    }
    for score, values in expected.items():
        found = class_scores(score, probabilities, uniform, penalty=0.1, free_ranks=1)
        torch.testing.assert_close(found, torch.tensor([values]).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_samples", "error", "rank"), [(99, 0.1, 90), (100, 0.1, 91), (9, 0.1, 9), (8, 0.1, 9), (19, 0.05, 19)]
)
def test_the_threshold_is_the_score_of_rank_ceil_n_plus_1_times_1_minus_error(num_samples, error, rank):
    assert quantile_rank(num_samples, error) == rank
    scores = torch.arange(1.0, num_samples + 1)[torch.randperm(num_samples)]
    assert quantile(scores, error) == (math.inf if rank > num_samples else rank)


def test_with_too_few_samples_every_class_is_in_every_set():
    probabilities, _ = pool(5)
    conformal = Conformal("lac", 0.1, (quantile(torch.rand(8), 0.1),), 8)
    assert conformal.sets(probabilities, torch.zeros(5)).all()


def splits() -> Tensor:
    """Indices (SPLITS, CALIBRATION + TEST) of samples, each row without repetition; rows share nothing."""
    return torch.arange(SPLITS * (CALIBRATION + TEST)).view(SPLITS, -1)


def assert_follows_the_law(coverages: Tensor, error: float) -> None:
    """Coverages (SPLITS,) on TEST samples are Beta-binomial: in the mean, the deviation and the tails."""
    b = math.floor((CALIBRATION + 1) * error + 1e-9)
    a = CALIBRATION + 1 - b
    mean = a / (a + b)
    variance = a * b / ((a + b) ** 2 * (a + b + 1)) * (1 + (a + b) / TEST)
    assert float(coverages.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / SPLITS))
    assert float(coverages.var()) == pytest.approx(variance, rel=0.45)
    inside = (coverages - mean).abs() <= 2 * math.sqrt(variance)
    # about 95 %, with the binomial noise of 200 splits
    assert 0.95 - 4 * math.sqrt(0.05 * 0.95 / SPLITS) <= float(inside.double().mean()) <= 1


@pytest.mark.parametrize("score", CLASS_SCORES)
@pytest.mark.parametrize("error", [0.1, 0.25])
def test_the_coverage_of_sets_over_200_splits_follows_its_beta_law(score, error):
    probabilities, classes = pool(SPLITS * (CALIBRATION + TEST))
    uniform = uniform_by_position(0, "test", len(classes))
    scores = class_scores(score, probabilities, uniform)
    coverages = []
    for chosen in splits():
        own, new = chosen[:CALIBRATION], chosen[CALIBRATION:]
        threshold = quantile(pick(scores[own], classes[own]), error)
        sets = Conformal(score, error, (threshold,), CALIBRATION).sets(probabilities[new], uniform[new])
        coverages.append(pick(sets, classes[new]).double().mean())
    assert_follows_the_law(torch.stack(coverages), error)


@pytest.mark.parametrize("score", VALUE_SCORES)
def test_the_coverage_of_intervals_over_200_splits_follows_its_beta_law(score):
    random = torch.Generator().manual_seed(0)
    count = SPLITS * (CALIBRATION + TEST)
    spreads = 0.2 + torch.rand(count, 1, generator=random, dtype=torch.float64)
    errors = (spreads * torch.randn(count, 1, generator=random, dtype=torch.float64)).abs()
    coverages = []
    for chosen in splits():
        own, new = chosen[:CALIBRATION], chosen[CALIBRATION:]
        scores = errors[own] if score == "absolute" else errors[own] / at_least(spreads[own], (1e-3,))
        fitted = Conformal(score, 0.1, (quantile(scores.flatten(), 0.1),), CALIBRATION, least_spreads=(1e-3,))
        coverages.append((errors[new] <= fitted.half_widths(spreads[new])).double().mean())
    assert_follows_the_law(torch.stack(coverages), 0.1)


def test_normalised_intervals_are_wider_where_the_members_differ():
    fitted = Conformal("normalised", 0.1, (2.0, 3.0), 50, least_spreads=(0.5, 0.1))
    widths = fitted.half_widths(torch.tensor([[0.1, 1.0], [4.0, 0.0]]))
    torch.testing.assert_close(widths, torch.tensor([[1.0, 3.0], [8.0, 0.3]]).double())


def test_the_randomness_of_an_input_depends_on_nothing_but_the_seed_and_the_input():
    inputs = torch.randn(500, 3, 4)
    found = uniform_by_input(7, inputs)
    assert found.equal(uniform_by_input(7, inputs.flip(0)).flip(0))
    assert found[10:11].equal(uniform_by_input(7, inputs[10:11]))
    assert not found.equal(uniform_by_input(8, inputs))
    # uniform: its mean and its largest gap from the identity (Kolmogorov-Smirnov at 0.1 %)
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    gap = (found.sort().values - torch.arange(1, 501) / 500).abs().max()
    assert float(gap) < 1.95 / math.sqrt(500)


def test_a_conformal_fit_survives_json():
    fitted = Conformal("normalised", 0.05, (1.5, 2.5), 77, 3, least_spreads=(0.1, 0.2))
    assert Conformal.from_json(fitted.to_json()) == fitted


def test_coverage_is_reported_by_class_and_by_size():
    covered, sizes = torch.tensor([True, False, True, True]), torch.tensor([1, 1, 3, 2])
    coverage = Coverage(covered, sizes, torch.tensor([0, 0, 0, 2]))
    assert coverage.metrics() == {"coverage": 0.75, "mean_set_size": 1.75}
    assert coverage.by_class(3) == [pytest.approx(2 / 3), None, 1.0]
    assert coverage.by_size() == [
        {"size": 1, "count": 2, "coverage": 0.5},
        {"size": 2, "count": 1, "coverage": 1.0},
        {"size": 3, "count": 1, "coverage": 1.0},
    ]
