"""The diversity on the training batches, which tells members that collude when it is compared with other data."""

from __future__ import annotations

import pytest
import torch
from helpers.small_runs import Crash, CrashOnSave, rows, small_spec, training

import ensemblekit as ek
from ensemblekit.core.losses import Loss
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.training.statistics import EpochStatistics


def statistics_of(outputs: torch.Tensor, targets: torch.Tensor, loss: str, sizes: list[int]) -> EpochStatistics:
    spec = ek.load_spec(small_spec(training=training(loss=loss)))
    statistics = EpochStatistics(Objective([], spec.loss), list(range(len(outputs))))
    for part, own in zip(outputs.split(sizes, dim=1), targets.split(sizes), strict=True):
        statistics.add(torch.tensor(1.0), part, Batch(torch.zeros(len(own), 1), own, torch.arange(len(own))))
    statistics.check_finite(1, "")
    return statistics


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_it_is_the_diversity_of_the_decomposition_over_all_samples_of_the_epoch(monkeypatch, loss):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 25, 3, generator=generator)
    targets = torch.arange(25) % 3
    expected = float(ek.decompose(outputs, targets, loss).diversity)
    for pending_bytes in (1, 2**24):  # summed step by step, and all at once
        monkeypatch.setattr("ensemblekit.training.statistics.PENDING_BYTES", pending_bytes)
        means = statistics_of(outputs, targets, loss, [10, 10, 5]).means()
        assert means["train_diversity"] == pytest.approx(expected, rel=1e-5)


def test_one_member_or_a_loss_without_second_derivative_has_none(monkeypatch):
    outputs, targets = torch.randn(2, 6, 3), torch.arange(6) % 3
    assert "train_diversity" not in statistics_of(outputs[:1], targets, "cross_entropy", [6]).means()
    monkeypatch.setattr(Loss, "twice_differentiable", False)
    assert "train_diversity" not in statistics_of(outputs, targets, "cross_entropy", [6]).means()


def test_every_epoch_of_a_run_has_it_also_if_it_was_interrupted_inside_one(tmp_path):
    spec = small_spec(training=training(checkpoint_every_minutes=1e-6))
    ek.train(spec, tmp_path / "whole", progress=False)
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "stopped", progress=CrashOnSave(1, 2))
    ek.resume(tmp_path / "stopped", progress=False)
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    assert all(row["train_diversity"] > 0 for row in rows(tmp_path / "whole"))


def test_an_epoch_that_was_begun_without_it_has_none():
    outputs, targets = torch.randn(2, 6, 3), torch.arange(6) % 3
    begun = statistics_of(outputs, targets, "cross_entropy", [6])
    tensors = {name: value for name, value in begun.tensors().items() if "diversity" not in name}
    going_on = EpochStatistics(begun.objective, [0, 1])
    going_on.restore(tensors, begun.state())
    going_on.add(torch.tensor(1.0), outputs, Batch(torch.zeros(6, 1), targets, torch.arange(6)))
    going_on.check_finite(1, "")
    assert "train_loss" in going_on.means()
    assert "train_diversity" not in going_on.means()
