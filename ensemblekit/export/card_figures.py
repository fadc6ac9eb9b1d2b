"""The figures of a model card: test metrics with intervals, the decomposition of the loss, the weakest classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ensemblekit.analysis.bootstrap import Interval, centred_interval, resampled
from ensemblekit.analysis.measures import sample_quantities, statistics_of
from ensemblekit.core.confusion import class_report, confusion_matrix, label_report
from ensemblekit.core.errors import DataError
from ensemblekit.core.label_metrics import predicted_labels
from ensemblekit.core.tasks import task_of
from ensemblekit.inference.combining import Combiner
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.runs.run import Run

PREFIX = "test_"
LABELS = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood (NLL)",
    "brier": "Brier score",
    "ece": "expected calibration error (ECE)",
    "aurc": "area under the risk-coverage curve (AURC)",
    "coverage": "coverage of the prediction sets or intervals",
    "mean_set_size": "mean size of a prediction set",
    "mean_interval_width": "mean width of a prediction interval",
    "rmse": "root mean squared error (RMSE)",
    "mse": "mean squared error (MSE)",
    "mae": "mean absolute error (MAE)",
    "r2": "R²",
    "mean_member_accuracy": "accuracy of a member, on average",
    "best_member_accuracy": "accuracy of the best member",
    "mean_member_mse": "MSE of a member, on average",
    "best_member_mse": "MSE of the best member",
    "disagreement": "disagreement of two members",
}
"""The built-in metrics of the card in the order of its table; metrics of plugins follow."""
SHARES = ("accuracy", "coverage", "mean_member_accuracy", "best_member_accuracy", "disagreement")
DECOMPOSITION = ("mean_output_loss", "mean_member_loss", "diversity", "remainder")
WEAKEST = 5
"""So many classes with the lowest recall are listed."""


@dataclass(frozen=True)
class CardFigures:
    """What is known about the quality of a run's ensemble on its test data."""

    metrics: Mapping[str, float]
    """Test metrics by names without the prefix of a split, of the calibrated outputs if the run is calibrated."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """95 % intervals of some of them."""
    num_samples: int | None = None
    """Test samples; None if their outputs are not known, so that there are no intervals."""
    weakest: list[dict[str, Any]] = field(default_factory=list)
    """The classes or labels with the lowest recall, if any is below 1."""
    plugin_metrics: frozenset[str] = frozenset()
    """Names of the metrics that are not built-in."""

    @property
    def decomposition(self) -> dict[str, float] | None:
        """The four terms by name; None if the loss is not twice differentiable."""
        found = {name: self.metrics[name] for name in DECOMPOSITION if name in self.metrics}
        return found if len(found) == len(DECOMPOSITION) else None

    @property
    def rows(self) -> list[tuple[str, float, Interval | None, bool]]:
        """Label, value, interval, and whether it is a share, of each metric of the table."""
        plugins = [name for name in self.metrics if name in self.plugin_metrics]
        names = [*(name for name in LABELS if name in self.metrics), *plugins]
        return [
            (LABELS.get(name, name.replace("_", " ")), self.metrics[name], self.intervals.get(name), name in SHARES)
            for name in names
        ]


def card_figures(run: Run, model: Mapping[str, Any], data: Any = None) -> CardFigures:
    """Compute the figures of a run from its kept outputs; without any, they are those that it has recorded.

    Args:
        run: a finished run.
        model: its model metadata.
        data: the data that was passed in Python, if the run has kept no outputs.
    """
    plugins = frozenset(metric.name for metric in run.spec.known_metrics)
    try:
        kept = run.outputs("test", data)
    except DataError:  # outputs that were not kept, and data that is not there any more
        recorded = {name.removeprefix(PREFIX): value for name, value in run.metrics.items() if name.startswith(PREFIX)}
        numbers = {name: float(value) for name, value in recorded.items() if isinstance(value, int | float)}
        return CardFigures(numbers, plugin_metrics=plugins)
    combiner = run.combiner()
    statistics = statistics_of(sample_quantities(kept, combiner))
    values = resampled(list(statistics.values()))
    metrics = combiner.metrics(kept)
    intervals = {
        name: _possible(name, centred_interval(metrics[name], values[:, index]))
        for index, name in enumerate(statistics)
        if name in metrics
    }
    return CardFigures(
        metrics, intervals, len(kept), _weakest(kept, combiner, model.get("classes")), plugin_metrics=plugins
    )


def _possible(name: str, interval: Interval) -> Interval:
    """Return an interval without values that the metric cannot have: shifting it may have led there."""
    low = interval.low if name == "r2" else max(interval.low, 0.0)
    return Interval(low, min(interval.high, 1.0) if name in (*SHARES, "ece", "r2") else interval.high)


def _weakest(kept: KeptOutputs, combiner: Combiner, names: list[str] | None) -> list[dict[str, Any]]:
    task = task_of(combiner.loss, kept.outputs, kept.targets)
    if not task.has_probabilities:
        return []
    probabilities = combiner.loss.probabilities(combiner.combine_kept(kept).double())
    targets = task.target_for_metrics(kept.targets, combiner.loss)
    if task.name == "multilabel":
        report = label_report(predicted_labels(probabilities), targets.bool(), names)
    else:
        confusion = confusion_matrix(probabilities.argmax(dim=-1), targets.to(torch.int64), probabilities.shape[-1])
        report = class_report(confusion, names)
    below = [entry for entry in report if entry["recall"] is not None and entry["recall"] < 1]
    return sorted(below, key=lambda entry: float(entry["recall"]))[:WEAKEST]
