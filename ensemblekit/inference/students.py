"""A run that was distilled from another, and how the two compare: quality, size, time of a prediction, disagreement."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.metrics import uncertainty
from ensemblekit.data.loading import Data
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.runs.run import Run

MEASURES = ("accuracy", "nll", "ece", "rmse", "r2")
"""The metrics that are compared, where the task has them."""
TIMED_SAMPLES = 1000
MIN_ROUNDS, MIN_SECONDS = 10, 1.0
"""Predictions are timed at least so often and so long."""


@dataclass(frozen=True)
class DistilledRun(Run):
    """The run of a student, opened for reading, and what it was distilled from."""

    teacher: Run | None = None
    """The run of the ensemble."""
    baseline: Run | None = None
    """The run of the same network trained on labels alone, if it was asked for."""
    comparison: dict[str, float] = field(default_factory=dict)
    """Figures of the teacher and of the baseline beside the student's own; `ensemblekit distil --json` prints them."""

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table of student, teacher and baseline: the names of the columns, then a row for each run."""
        return comparison_rows(self)


def distilled(student: Run, teacher: Run, baseline: Run | None, data: Data) -> DistilledRun:
    """Compare a student with its teacher and with the baseline.

    Args:
        student: its run.
        teacher: that of the ensemble.
        baseline: that of the same network trained on labels alone.
        data: what they were trained on; its test inputs are predicted to measure the time.
    """
    runs = {"": student, "teacher_": teacher} | ({} if baseline is None else {"baseline_": baseline})
    figures: dict[str, float] = {}
    for prefix, run in runs.items():
        names = [f"test_{name}" for name in MEASURES if f"test_{name}" in run.metrics]
        figures |= {f"{prefix}{name}": run.metrics[name] for name in names if prefix}
        figures[f"{prefix}parameters"] = sum(each.numel() for each in run.ensemble.members.parameters())
    figures |= _times(student.ensemble, teacher.ensemble, _some_inputs(data))
    if len(student.members) > 1 and len(teacher.members) > 1:
        figures |= _disagreement(student, teacher)
    values = {entry.name: getattr(student, entry.name) for entry in fields(Run)}
    return DistilledRun(**values, teacher=teacher, baseline=baseline, comparison=figures)


def _some_inputs(data: Data) -> Tensor:
    """Return the first test inputs, prepared as for predictions."""
    size = min(TIMED_SAMPLES, len(data.test))
    return next(iter(data.test.batches(size))).inputs.cpu()


def _times(student: Ensemble, teacher: Ensemble, inputs: Tensor) -> dict[str, float]:
    """Measure predictions of both in turn, A B A B …, so that a machine whose speed drifts favours neither.

    The least time counts: other work on the machine only ever adds to it, and adds more where one network waits for
    several cores.
    """
    seconds: dict[Ensemble, list[float]] = {student: [], teacher: []}
    for ensemble in seconds:
        ensemble(inputs)  # folds the members for predictions
    start = time.perf_counter()
    while len(seconds[student]) < MIN_ROUNDS or time.perf_counter() - start < MIN_SECONDS:
        for ensemble, measured in seconds.items():
            before = time.perf_counter()
            ensemble(inputs)
            measured.append(time.perf_counter() - before)
    own, theirs = (min(measured) * 1e6 / len(inputs) for measured in seconds.values())
    return {"milliseconds_per_1000": own, "teacher_milliseconds_per_1000": theirs, "time_ratio": own / theirs}


def _disagreement(student: Run, teacher: Run) -> dict[str, float]:
    """Compare how much the members disagree on each test sample: their means, and their correlation over the samples.

    For classes it is the mutual information, for values the standard deviation over the members.
    """
    name = "mutual_information" if student.ensemble.info.task == "classification" else "standard_deviation"
    own, theirs = (_disagreement_of(run) for run in (student, teacher))
    return {
        f"{name}_correlation": float(torch.corrcoef(torch.stack([own, theirs]))[0, 1]),
        f"mean_{name}": float(own.mean()),
        f"teacher_mean_{name}": float(theirs.mean()),
    }


def _disagreement_of(run: Run) -> Tensor:
    """Return the disagreement of the members for each test sample (N,)."""
    outputs, ensemble = run.outputs("test").outputs, run.ensemble
    if ensemble.info.task == "classification":
        return uncertainty(ensemble.loss.probabilities(outputs.double())).mutual_information
    return ensemble.loss.point(outputs.double()).std(dim=0, correction=0).mean(dim=-1)


def comparison_rows(run: DistilledRun) -> list[tuple[str, ...]]:
    """Return a table: the names of the columns, then a row for the student, its teacher and the baseline."""
    figures: Mapping[str, Any] = run.comparison | {f"test_{name}": run.metrics.get(f"test_{name}") for name in MEASURES}
    measures = [f"test_{name}" for name in MEASURES if run.metrics.get(f"test_{name}") is not None]
    columns = ("run", *measures, "parameters", "ms per 1,000")
    labels = {"student": "", "teacher": "teacher_"} | ({} if run.baseline is None else {"labels alone": "baseline_"})
    return [columns, *((label, *_cells(figures, prefix, measures)) for label, prefix in labels.items())]


def _cells(figures: Mapping[str, Any], prefix: str, measures: Sequence[str]) -> list[str]:
    cells = [f"{figures[f'{prefix}{name}']:.4f}" for name in measures]
    time_taken = figures.get(f"{prefix}milliseconds_per_1000")
    return [*cells, f"{figures[f'{prefix}parameters']:,}", "" if time_taken is None else f"{time_taken:.3g}"]
