"""Metrics of labels against scikit-learn, and what they are where nothing is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import ensemblekit as ek
from ensemblekit.core.label_losses import BCE
from ensemblekit.core.label_metrics import (
    average_precision,
    label_calibration_error,
    label_disagreement,
    macro_f1,
    mean_average_precision,
    micro_f1,
)

SEED = torch.Generator().manual_seed(0)
M, N, C = 3, 200, 5
OUTPUTS = 2 * torch.randn(M, N, C, generator=SEED, dtype=torch.float64)
LABELS = (torch.rand(N, C, generator=SEED) < torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])).double()


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return ek.evaluate(OUTPUTS, LABELS, "bce")


def test_metrics_are_those_of_scikit_learn(found):
    probabilities = OUTPUTS.mean(0).sigmoid().numpy()
    predicted, truth = probabilities >= 0.5, LABELS.numpy().astype(int)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(truth, predicted))
    assert found["label_accuracy"] == pytest.approx(1 - reference.hamming_loss(truth, predicted))
    for average in ("micro", "macro"):
        assert found[f"{average}_f1"] == pytest.approx(reference.f1_score(truth, predicted, average=average))
    assert found["average_precision"] == pytest.approx(
        reference.average_precision_score(truth, probabilities, average="macro")
    )
    losses = [reference.log_loss(truth[:, c], probabilities[:, c]) for c in range(C)]
    assert found["nll"] == pytest.approx(sum(losses)) == pytest.approx(found["loss"])
    assert found["brier"] == pytest.approx(
        sum(reference.brier_score_loss(truth[:, c], probabilities[:, c]) for c in range(C))
    )


def test_members_are_measured_by_themselves(found):
    own = [reference.accuracy_score(LABELS.numpy(), (member > 0).numpy()) for member in OUTPUTS]
    assert found["mean_member_accuracy"] == pytest.approx(np.mean(own))
    assert found["best_member_accuracy"] == pytest.approx(max(own))
    assert found["oracle_accuracy"] >= found["best_member_accuracy"]
    pairs = [
        reference.hamming_loss((OUTPUTS[i] > 0).numpy(), (OUTPUTS[j] > 0).numpy()) for i in range(M) for j in range(i)
    ]
    assert found["disagreement"] == pytest.approx(np.mean(pairs))
    assert found["mutual_information"] == pytest.approx(found["entropy"] - found["aleatoric_entropy"])


def test_the_calibration_error_is_the_mean_over_labels_of_the_gaps_in_bins():
    probabilities = torch.rand(500, 2, generator=SEED, dtype=torch.float64)
    truth = torch.rand(500, 2, generator=SEED) < 0.3
    errors = []
    for c in range(2):
        error = 0.0
        for low in range(15):
            inside = (probabilities[:, c] > low / 15) & (probabilities[:, c] <= (low + 1) / 15)
            if bool(inside.any()):
                gap = truth[inside, c].double().mean() - probabilities[inside, c].mean()
                error += float(inside.double().mean() * gap.abs())
        errors.append(error)
    assert float(label_calibration_error(probabilities, truth)) == pytest.approx(np.mean(errors))


def test_average_precision_counts_equal_scores_as_one_threshold():
    scores = torch.tensor([0.5, 0.5, 0.2, 0.9, 0.5], dtype=torch.float64)
    labels = torch.tensor([True, False, True, False, True])
    expected = reference.average_precision_score(labels.numpy(), scores.numpy())
    assert float(average_precision(scores, labels)) == pytest.approx(expected)


def test_labels_that_nobody_has_do_not_make_metrics_undefined():
    nothing = torch.zeros(4, 3, dtype=torch.bool)
    assert float(micro_f1(nothing, nothing)) == 0
    assert float(macro_f1(nothing, nothing)) == 0
    assert float(mean_average_precision(torch.rand(4, 3), nothing)) == 0
    assert label_disagreement(nothing.unsqueeze(0)).tolist() == [0, 0, 0, 0]
    metrics = ek.evaluate(torch.zeros(2, 4, 3), torch.zeros(4, 3), BCE())
    assert all(np.isfinite(value) for value in metrics.values())
