"""Runs and ensembles that were never trained, for tests of what is shown of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.display.summary import RunSummary, run_summary

CLASSIFIER: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [4], "dropout": 0.1},
    "ensemble": {"members": 3},
    "method": {"name": "gncl", "lambda": 0.5},
}
METRICS = {
    "test_loss": 0.071,
    "test_accuracy": 0.983,
    "test_diversity": 0.031,
    "test_ece": 0.012,
    "test_mean_member_accuracy": 0.962,
    "test_best_member_accuracy": 0.975,
    "test_worst_member_accuracy": 0.951,
    "test_mean_member_loss": 0.098,
    "test_remainder": 0.004,
}
REGRESSION_METRICS = {
    "test_loss": 1450.0,
    "test_mse": 2900.0,
    "test_r2": 0.5,
    "test_diversity": 100.0,
    "test_remainder": 0.0,
    "test_mean_member_loss": 1550.0,
    "test_mean_member_mse": 3100.0,
    "test_best_member_mse": 3000.0,
}


def members(count: int = 3, quality: str = "accuracy") -> list[dict[str, Any]]:
    return [
        {"index": i, quality: 0.95 + i / 100, "loss": 0.1 - i / 100, "parameters": 1234, "frozen": i == 0}
        for i in range(count)
    ]


@dataclass(frozen=True)
class FakeRun:
    path: Path = Path("runs/digits-1")
    spec: ek.Spec = field(default_factory=lambda: ek.load_spec(CLASSIFIER))
    metrics: dict[str, float] = field(default_factory=lambda: dict(METRICS))
    members: list[dict[str, Any]] = field(default_factory=members)
    seconds: dict[str, float] = field(default_factory=lambda: {"training": 12.34, "evaluation": 0.5, "start": 2.0})

    def summary(self) -> RunSummary:
        return run_summary(self.path, self.spec, self.metrics, self.members, self.seconds)


def linear_ensemble(
    spec: ek.Spec,
    weights: Tensor,
    info: ek.DataInfo,
    classes: tuple[str, ...] | None = None,
    transform: ImageTransform | None = None,
) -> ek.Ensemble:
    """An ensemble of members that are linear in the flattened inputs, with weights (M, C, F)."""
    members = []
    for own in weights:
        linear = nn.Linear(own.shape[1], own.shape[0], bias=False)
        linear.weight = nn.Parameter(own)
        members.append(nn.Sequential(nn.Flatten(), linear))
    return ek.Ensemble(members, spec, info, classes, transform)
