"""The numbers behind the figures of a report, compared with scikit-learn, numpy, loops and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix as sklearn_confusion

from ensemblekit.analysis.report.calibration import reliability, uncertainty_histogram
from ensemblekit.analysis.report.classes import frequent_confusions
from ensemblekit.analysis.report.curves import curves, decomposition_chart, learning_charts, thinned
from ensemblekit.analysis.report.members import accuracy_margins, error_correlation, pairwise_disagreement
from ensemblekit.analysis.report.predictions import Predictions, predict, vote_counts
from ensemblekit.analysis.report.regression import ValuePredictions, spread_bins
from ensemblekit.analysis.report.samples import class_samples, value_samples, with_inputs
from ensemblekit.analysis.report.sizes import chosen_sizes, member_orders, size_curves
from ensemblekit.core.confusion import confusion_matrix
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.metrics import calibration_error, disagreement, uncertainty
from ensemblekit.core.selective_prediction import RiskCoverage


@pytest.fixture(scope="module")
def outputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return 2 * torch.randn(5, 400, 4, generator=generator) + torch.randn(400, 4, generator=generator)


@pytest.fixture(scope="module")
def predictions(outputs: torch.Tensor) -> Predictions:
    targets = torch.randint(4, (400,), generator=torch.Generator().manual_seed(4))
    outputs[:, torch.arange(400), targets] += 1.5
    return predict(outputs, outputs.mean(dim=0), targets, CrossEntropy(), ["a", "b", "c", "d"])


def test_reliability_bins_are_those_of_scikit_learn(predictions):
    ours = reliability(predictions.confidence, predictions.correct, bins=10)
    accuracy, confidence = calibration_curve(predictions.correct.numpy(), predictions.confidence.numpy(), n_bins=10)
    filled = [index for index, count in enumerate(ours.counts) if count]
    assert [ours.accuracy[index] for index in filled] == pytest.approx(accuracy.tolist())
    assert [ours.confidence[index] for index in filled] == pytest.approx(confidence.tolist())
    assert sum(ours.counts) == 400


def test_the_calibration_error_of_the_diagram_is_the_metric(predictions):
    ours = reliability(predictions.confidence, predictions.correct)
    assert ours.error == pytest.approx(float(calibration_error(predictions.probabilities, predictions.targets)))


def test_confidence_above_accuracy_is_over_confident():
    confidence = torch.full((10,), 0.95)
    assert reliability(confidence, torch.arange(10) < 5).over_confident
    assert not reliability(torch.full((10,), 0.3), torch.arange(10) < 5).over_confident


def test_risk_is_the_error_among_the_most_confident(predictions):
    curve = RiskCoverage.of(predictions.confidence, ~predictions.correct)
    order = np.argsort(-predictions.confidence.numpy(), kind="stable")
    wrong = 1 - predictions.correct.numpy().astype(float)[order]
    risks = [wrong[: kept + 1].mean() for kept in range(400)]
    assert curve.risk.tolist() == pytest.approx(risks)
    assert float(curve.area) == pytest.approx(np.mean(risks))
    assert float(curve.risk_at(1)) == pytest.approx(1 - float(predictions.correct.double().mean()))
    assert float(curve.risk_at(0.5)) == pytest.approx(risks[199])


def test_samples_of_equal_confidence_count_with_their_mean_error_in_any_order():
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.5])
    curves = [
        RiskCoverage.of(confidence, ~torch.tensor(correct, dtype=torch.bool)).risk.tolist()
        for correct in ([1, 1, 0, 0, 1], [1, 0, 0, 1, 1])
    ]
    assert curves[0] == pytest.approx(curves[1])
    assert curves[0] == pytest.approx([0, 0.5 / 2, 1 / 3, 1.5 / 4, 2 / 5])


def test_the_histogram_counts_every_prediction_once(predictions):
    histogram = uncertainty_histogram(predictions.entropy, predictions.correct, bins=7)
    edges = np.linspace(float(predictions.entropy.min()), float(predictions.entropy.max()), 8)
    right, _ = np.histogram(predictions.entropy[predictions.correct].numpy(), edges)
    assert list(histogram.right) == right.tolist()
    assert sum(histogram.right) + sum(histogram.wrong) == 400


def test_an_uncertainty_that_is_the_same_everywhere_has_a_histogram():
    histogram = uncertainty_histogram(torch.zeros(5), torch.ones(5, dtype=torch.bool), bins=3)
    assert (sum(histogram.right), sum(histogram.wrong)) == (5, 0)


def test_disagreement_of_pairs_averages_to_the_metric(predictions):
    matrix = pairwise_disagreement(predictions.votes)
    assert matrix.diagonal().tolist() == [0] * 5
    pairs = matrix[~torch.eye(5, dtype=torch.bool)]
    assert float(pairs.mean()) == pytest.approx(float(disagreement(predictions.votes, 4)))
    assert float(matrix[1, 3]) == pytest.approx(float((predictions.votes[1] != predictions.votes[3]).double().mean()))


def test_error_correlation_is_numpys_and_nan_for_a_member_without_errors(predictions):
    errors = (~predictions.member_correct).double()
    assert np.allclose(error_correlation(errors).numpy(), np.corrcoef(errors.numpy()))
    errors[2] = 0
    matrix = error_correlation(errors)
    assert bool(matrix[2].isnan().all())
    assert float(matrix[0, 1]) == pytest.approx(np.corrcoef(errors[:2].numpy())[0, 1])


def test_the_interval_of_an_accuracy_is_that_of_a_binomial_share():
    assert accuracy_margins([0.5], 100) == pytest.approx((1.96 * 0.05,))


def test_predictions_agree_with_the_core(predictions, outputs):
    uncertain = uncertainty(member.double().softmax(dim=-1) for member in outputs)
    assert torch.allclose(predictions.entropy, uncertain.entropy)
    assert torch.allclose(predictions.mutual_information, uncertain.mutual_information)
    assert torch.equal(predictions.votes, outputs.argmax(dim=-1))
    assert vote_counts(predictions.votes, 4).sum(dim=1).tolist() == [5] * 400
    assert 1 - float(predictions.agreement.mean()) == pytest.approx(float(disagreement(predictions.votes, 4)))


def test_frequent_confusions_are_the_largest_entries_off_the_diagonal(predictions):
    counts = confusion_matrix(predictions.predicted, predictions.targets, 4)
    expected = sklearn_confusion(predictions.targets.numpy(), predictions.predicted.numpy())
    assert counts.tolist() == expected.tolist()
    ((true, taken, count),) = frequent_confusions(counts, predictions.classes, 1)
    assert count == (expected - np.diag(np.diag(expected))).max() == expected["abcd".index(true), "abcd".index(taken)]
    assert frequent_confusions(torch.eye(3, dtype=torch.int64), ("x", "y", "z"), 5) == []


def score_by_mse(targets):
    return lambda combined: {"mse": float((combined.double() - targets).square().mean())}


def test_the_squared_error_against_the_number_of_members_follows_its_closed_form():
    generator = torch.Generator().manual_seed(0)
    targets = torch.zeros(20_000, 1, dtype=torch.float64)
    bias = 0.3 * torch.randn(20_000, 1, generator=generator)
    members = bias + torch.randn(12, 20_000, 1, generator=generator)
    curve = size_curves(members, lambda part: part.mean(dim=0), score_by_mse(targets))["mse"]
    # bias² + variance/m: independent members
    assert curve.mean == pytest.approx([0.09 + 1 / size for size in curve.sizes], rel=0.03)
    assert curve.slope == pytest.approx(1, rel=0.05)
    assert curve.doubling == pytest.approx(-1 / 24, rel=0.05)
    assert curve.asymptote == pytest.approx(0.09, abs=0.01)


def test_one_member_is_the_mean_member_and_all_members_are_the_ensemble(outputs):
    targets = torch.zeros(400, 4, dtype=torch.float64)
    curve = size_curves(outputs, lambda part: part.mean(dim=0), score_by_mse(targets))["mse"]
    assert curve.mean[0] == pytest.approx(float(outputs.double().square().mean()), rel=1e-5)
    assert curve.mean[-1] == pytest.approx(float(outputs.double().mean(dim=0).square().mean()), rel=1e-5)
    assert curve.spread[-1] == pytest.approx(0, abs=1e-7)


def test_members_that_are_not_averaged_are_combined_by_their_own_rule(outputs):
    targets = torch.zeros(400, 4, dtype=torch.float64)
    curve = size_curves(outputs, lambda part: 0.5 * part.sum(dim=0), score_by_mse(targets))["mse"]
    assert curve.mean[-1] == pytest.approx(float((0.5 * outputs.double().sum(dim=0)).square().mean()), rel=1e-5)
    assert curve.mean[0] == pytest.approx(float((0.5 * outputs.double()).square().mean()), rel=1e-5)


def test_every_member_is_first_equally_often_and_sizes_reach_all_members():
    orders = member_orders(6, seed=0)
    assert {sum(order[0] == member for order in orders) for member in range(6)} == {len(orders) // 6}
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(member_orders(50, seed=0)) == 20
    assert chosen_sizes(4) == (1, 2, 3, 4)
    assert chosen_sizes(64)[:2] == (1, 2)
    assert chosen_sizes(64)[-1] == 64
    assert len(chosen_sizes(64)) <= 16


def test_spread_is_compared_with_the_error_in_bins_of_equal_size():
    spread, residuals = torch.arange(1.0, 101.0), torch.arange(1.0, 101.0) * 2
    binned = spread_bins(spread, residuals, bins=4)
    assert binned.counts == (25, 25, 25, 25)
    assert [error / spread for error, spread in zip(binned.error, binned.spread, strict=True)] == pytest.approx([2] * 4)


def test_a_large_scatter_plot_shows_some_samples_with_both_ends():
    targets = torch.randn(5000, generator=torch.Generator().manual_seed(1)).double()
    values = ValuePredictions(targets, targets, targets.unsqueeze(0))
    assert len(values.shown) == 400
    assert {float(targets.min()), float(targets.max())} <= set(targets[values.shown].tolist())


def test_chosen_samples_are_those_that_their_titles_say(predictions):
    groups = {group.name: group for group in class_samples(predictions, torch.arange(1000, 1400), most=3)}
    uncertain = [sample.position for sample in groups["uncertain"].samples]
    assert uncertain[0] == int(predictions.entropy.argmax())
    assert [sample.index - sample.position for sample in groups["uncertain"].samples] == [1000] * 3
    wrong = predictions.confidence.masked_fill(predictions.correct, 0)
    assert groups["wrong"].samples[0].position == int(wrong.argmax())
    contested = [float(predictions.agreement[sample.position]) for sample in groups["contested"].samples]
    assert contested == [float(predictions.agreement.min())] * 3
    votes = groups["contested"].samples[0].votes
    assert sum(vote.count for vote in votes) == 5
    assert [vote.count for vote in votes] == sorted((vote.count for vote in votes), reverse=True)


def test_a_perfect_unanimous_ensemble_has_no_wrong_and_no_contested_samples():
    targets = torch.arange(6) % 3
    outputs = 10 * torch.nn.functional.one_hot(targets).float().expand(4, 6, 3)
    found = predict(outputs, outputs[0], targets, CrossEntropy(), None)
    assert [group.name for group in class_samples(found, torch.arange(6))] == ["uncertain"]
    assert found.classes == ("0", "1", "2")


def test_inputs_are_read_once_for_all_groups(predictions):
    asked = []

    def show(positions):
        asked.append(list(positions))
        return [{"picture": f"data:{position}"} for position in positions]

    groups = with_inputs(class_samples(predictions, torch.arange(400)), show)
    assert len(asked) == 1
    assert len(asked[0]) == len(set(asked[0]))
    assert all(sample.picture == f"data:{sample.position}" for group in groups for sample in group.samples)


def test_the_largest_errors_and_the_largest_spread_of_values():
    members = torch.zeros(3, 10, dtype=torch.float64)
    members[:, 4] = torch.tensor([-9.0, 0, 9])
    targets = torch.zeros(10, dtype=torch.float64)
    targets[7] = 5
    values = ValuePredictions(targets, members.mean(dim=0), members)
    errors, spread = value_samples(values, torch.arange(10), most=1)
    assert (errors.samples[0].position, spread.samples[0].position) == (7, 4)


HISTORY = [
    {"epoch": epoch, "train_loss": 1 / epoch, "validation_loss": 2 / epoch if epoch % 2 == 0 else None}
    for epoch in range(1, 9)
]


def test_curves_keep_epochs_without_a_value_as_gaps():
    found = curves(HISTORY, {"train_loss": "training", "validation_loss": "validation", "test_loss": "test"})
    assert set(found.values) == {"training", "validation"}
    assert found.values["validation"][:3] == (None, 1.0, None)
    assert found.last("validation") == 0.25
    assert curves(HISTORY, {"nothing": "nothing"}) is None


def test_long_histories_are_thinned_and_keep_the_last_epoch():
    rows = thinned([{"epoch": epoch} for epoch in range(1, 1002)], most=100)
    assert len(rows) <= 101
    assert rows[-1]["epoch"] == 1001


def test_a_tooltip_of_a_curve_with_gaps_finds_its_rows():
    (chart,) = learning_charts(HISTORY, best_epoch=8)
    gids = [line.get_gid() for line in chart.figure.axes[0].lines]
    assert gids[:2] == ["series-1", "series-2-1.3.5.7"]


def test_the_decomposition_needs_its_terms():
    assert decomposition_chart(HISTORY) is None
    rows = [
        {
            "epoch": e,
            "test_mean_member_loss": 1.0,
            "test_diversity": 0.2,
            "test_remainder": 0.0,
            "test_remainder_bound": b,
        }
        for e, b in ((1, 5.0), (2, 0.1))
    ]
    chart = decomposition_chart(rows)
    assert "the shaded band, 0.1 at the end" in chart.caption
    assert len(chart.figure.axes[0].collections) == 1
    far = decomposition_chart([{**row, "test_remainder_bound": 9.0} for row in rows])
    assert "beyond this chart, 9 at the end" in far.caption
    assert len(far.figure.axes[0].collections) == 0
