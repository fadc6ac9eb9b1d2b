"""Curves over the epochs: loss, accuracy or squared error, and the terms of the decomposition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import Chart, DataTable, number

Row = Mapping[str, Any]
MOST_EPOCHS = 200
"""Longer histories are thinned out to about so many epochs."""


@dataclass(frozen=True)
class Curves:
    """Values by epoch; None where an epoch has none."""

    epochs: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]
    """By label, for the legend and the table."""
    best_epoch: int | None = None

    @property
    def table(self) -> DataTable:
        """A row for each epoch."""
        return DataTable.of(("epoch", *self.values), zip(map(str, self.epochs), *self.values.values(), strict=True))

    def last(self, label: str) -> float | None:
        """Return the last known value of a curve."""
        return next((value for value in reversed(self.values.get(label, ())) if value is not None), None)


def curves(history: Sequence[Row], names: Mapping[str, str], best_epoch: int | None = None) -> Curves | None:
    """Read curves from the lines of metrics.jsonl; None if there is not a single value.

    Args:
        history: the metrics of each epoch.
        names: the label of each metric.
        best_epoch: the epoch with the lowest validation loss, if it is known.
    """
    rows = thinned(history)
    values = {label: tuple(_value(row.get(name)) for row in rows) for name, label in names.items()}
    values = {label: column for label, column in values.items() if any(value is not None for value in column)}
    if not values:
        return None
    return Curves(tuple(int(row["epoch"]) for row in rows), values, best_epoch)


def thinned(history: Sequence[Row], most: int = MOST_EPOCHS) -> list[Row]:
    """Return about `most` epochs, evenly spaced, with the last one."""
    step = -(-len(history) // most) if history else 1
    return [row for index, row in enumerate(history) if (len(history) - 1 - index) % step == 0]


def _value(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def learning_charts(history: Sequence[Row], best_epoch: int | None) -> list[Chart]:
    """Draw the loss, and the accuracy or the squared error, on every split over the epochs."""
    charts = []
    for measure, title in {"loss": "Loss", "accuracy": "Accuracy", "mse": "Mean squared error"}.items():
        names = {f"{split}_{measure}": text for split, text in _SPLITS.items()}
        names[f"validation_mean_member_{measure}"] = "mean member, validation"
        if not any(f"validation_{measure}" in row for row in history):
            names[f"test_mean_member_{measure}"] = "mean member, test"
        data = curves(history, names, best_epoch)
        if data is not None and not (measure == "mse" and set(data.values) <= {"training"}):
            charts.append(_learning_chart(data, measure, title))
    return charts


_SPLITS = {"train": "training", "validation": "validation", "test": "test"}


def _learning_chart(data: Curves, measure: str, title: str) -> Chart:
    figure, (axes,) = drawing.new_figure()
    for index, (label, values) in enumerate(data.values.items()):
        drawing.series(axes, data.epochs, values, label, index, index + 1)
    if data.best_epoch is not None and data.best_epoch in data.epochs:
        axes.axvline(data.best_epoch, color=drawing.FOREGROUND, linewidth=0.8, linestyle=":")
    axes.set_xlabel("epoch", color=drawing.FOREGROUND)
    drawing.limit_ticks(axes, integers=True)
    drawing.legend(axes)
    ends = "; ".join(f"{label} ends at {number(end)}" for label in data.values if (end := data.last(label)) is not None)
    best = f" The dotted line is epoch {data.best_epoch}, with the lowest validation loss." if data.best_epoch else ""
    return Chart(
        name=f"curve-{measure}",
        title=f"{title} over the epochs",
        caption=f"{title} of the ensemble on each split, and of the mean member.{best}",
        description=f"Line chart over {len(data.epochs)} epochs: {ends}.",
        figure=figure,
        table=data.table,
    )


def decomposition_chart(history: Sequence[Row]) -> Chart | None:
    """Draw mean member loss, diversity and remainder over the epochs; None if they were not recorded."""
    split = "validation" if any("validation_diversity" in row for row in history) else "test"
    names = {
        f"{split}_mean_member_loss": "mean member loss",
        f"{split}_diversity": "diversity",
        f"{split}_remainder": "remainder",
        f"{split}_mean_output_loss": "loss of the mean output",
        f"{split}_remainder_bound": "bound on |remainder|",
    }
    data = curves(history, names)
    if data is None or "diversity" not in data.values:
        return None
    figure, (axes,) = drawing.new_figure()
    for index, (label, values) in enumerate(data.values.items()):
        if label != "bound on |remainder|":
            drawing.series(axes, data.epochs, values, label, index, index + 1)
    drawn = _draw_bound(axes, data)
    axes.set_xlabel("epoch", color=drawing.FOREGROUND)
    drawing.limit_ticks(axes, integers=True)
    drawing.legend(axes)
    ends = {label: data.last(label) for label in data.values}
    last = ", ".join(f"{label} {number(end)}" for label, end in ends.items() if end is not None)
    bound = ends.get("bound on |remainder|")
    where = "the shaded band" if drawn else "beyond this chart"
    banded = f" Its bound is {where}, {number(bound)} at the end." if bound is not None else ""
    return Chart(
        name="decomposition",
        title="Decomposition of the loss",
        caption=f"On {split} data: loss of the mean output = mean member loss − diversity + remainder. More diversity "
        f"at the same mean member loss is a better ensemble. The remainder is what the second-order expansion "
        f"leaves out.{banded}",
        description=f"Line chart over {len(data.epochs)} epochs; at the end: {last}.",
        figure=figure,
        table=data.table,
    )


def _draw_bound(axes: Axes, data: Curves) -> bool:
    """Shade the values that the remainder may have; False if they would not fit, as for members that are far apart."""
    bounds = data.values.get("bound on |remainder|", ())
    known = [(epoch, bound) for epoch, bound in zip(data.epochs, bounds, strict=bool(bounds)) if bound is not None]
    top = axes.get_ylim()[1]
    if not known or known[-1][1] > top:
        return False
    epochs, values = [epoch for epoch, _ in known], [min(bound, top) for _, bound in known]
    axes.fill_between(epochs, [-value for value in values], values, color=drawing.SERIES[2], alpha=0.12, linewidth=0)
    return True
