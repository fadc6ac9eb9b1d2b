"""Members: each against the ensemble, and how pairs of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import torch
from torch import Tensor

from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import Chart, DataTable, number, percent

MOST_ANNOTATED = 10
"""Heat maps of more members have no numbers in their cells; the table has them."""


@dataclass(frozen=True)
class MemberQuality:
    """A measure of each member and of the ensemble."""

    measure: str
    """"accuracy" or "mean squared error"."""
    values: tuple[float, ...]
    ensemble: float
    oracle: float | None = None
    """Share of samples for which at least one member is right."""
    margins: tuple[float, ...] | None = None
    """Half the width of each member's 95 % interval, from the sampling of the test data."""


def accuracy_margins(accuracies: Sequence[float], num_samples: int) -> tuple[float, ...]:
    """Return half the width of the 95 % interval of accuracies, by the normal approximation."""
    return tuple(1.96 * (value * (1 - value) / num_samples) ** 0.5 for value in accuracies)


def pairwise_disagreement(predictions: Tensor) -> Tensor:
    """Return the share of samples for which two members predict different classes, (M, M), from (M, N)."""
    return torch.stack([(predictions != row).double().mean(dim=1) for row in predictions])


def error_correlation(errors: Tensor) -> Tensor:
    """Return the correlation of the members' errors (M, N) over the samples, (M, M); nan for a constant row."""
    centred = errors.double() - errors.double().mean(dim=1, keepdim=True)
    norms = centred.norm(dim=1)
    return (centred @ centred.T) / (norms.unsqueeze(0) * norms.unsqueeze(1)).where(
        norms * norms.unsqueeze(1) > 0, torch.nan
    )


def quality_chart(quality: MemberQuality) -> Chart:
    """Draw each member beside the mean member and the ensemble."""
    members, mean = quality.values, sum(quality.values) / len(quality.values)
    is_accuracy = quality.measure == "accuracy"
    text = percent if is_accuracy else number
    figure, (axes,) = drawing.new_figure()
    lines: list[tuple[float, str, int, Any]] = [
        (quality.ensemble, "ensemble", 1, "-"),
        (mean, "mean member", 2, (0, (5, 2))),
    ]
    if quality.oracle is not None:
        lines.append((quality.oracle, "oracle (any member right)", 3, (0, (1, 1.5))))
    for value, label, style, dashes in lines:
        axes.axhline(
            value, color=drawing.SERIES[style], linestyle=dashes, linewidth=1.5, label=f"{label}: {text(value)}"
        )
    for index, value in enumerate(members):
        margin = quality.margins[index] if quality.margins else None
        axes.errorbar(
            [index], [value], [margin] if margin else None, color=drawing.SERIES[0], linewidth=1, capsize=2, zorder=3
        )
        axes.plot([index], [value], "o", color=drawing.SERIES[0], markersize=5, gid=f"cell-{index}-1")
    axes.set_xlabel("member", color=drawing.FOREGROUND)
    axes.set_ylabel(quality.measure, color=drawing.FOREGROUND)
    axes.set_xlim(-0.6, len(members) - 0.4)
    drawing.limit_ticks(axes, integers=True)
    drawing.legend_below(figure)
    rows = [(f"member {index}", value) for index, value in enumerate(members)]
    rows += [("mean member", mean), ("ensemble", quality.ensemble)]
    rows += [("oracle", quality.oracle)] if quality.oracle is not None else []
    best = max(members) if is_accuracy else min(members)
    intervals = " Bars are 95 % intervals of the test data's sampling." if quality.margins else ""
    return Chart(
        name="members",
        title="Members against the ensemble",
        caption=f"{quality.measure.capitalize()} on the test data.{intervals}",
        description=f"The ensemble has {text(quality.ensemble)}, the mean member {text(mean)}, the best {text(best)}.",
        figure=figure,
        table=DataTable.of(("", quality.measure), rows),
    )


def heat_map_chart(name: str, title: str, caption: str, matrix: Tensor, low: float, high: float) -> Chart:
    """Draw a matrix (M, M) of pairs of members.

    Args:
        name: of the chart.
        title: of the chart.
        caption: how to read it.
        matrix: the values; nan for none.
        low: the value of the darkest colour.
        high: the value of the lightest colour.
    """
    count = len(matrix)
    figure, (axes,) = drawing.new_figure(3.7)
    _draw_matrix(figure, axes, matrix.tolist(), low, high, annotated=count <= MOST_ANNOTATED)
    axes.set_xlabel("member", color=drawing.FOREGROUND)
    axes.set_ylabel("member", color=drawing.FOREGROUND)
    off = matrix[~torch.eye(count, dtype=torch.bool)]
    known = off[~off.isnan()]
    summary = "no pair has a value"
    if len(known):
        summary = (
            f"between {number(float(known.min()))} and {number(float(known.max()))}, mean {number(float(known.mean()))}"
        )
    rows = [(f"member {index}", *row) for index, row in enumerate(matrix.tolist())]
    return Chart(
        name=name,
        title=title,
        caption=f"{caption} Over all pairs: {summary}.",
        description=f"Heat map of {count} by {count} members; the pairs are {summary}.",
        figure=figure,
        table=DataTable.of(("", *(f"member {index}" for index in range(count))), rows, "matrix"),
    )


def _draw_matrix(
    figure: matplotlib.figure.Figure,
    axes: matplotlib.axes.Axes,
    values: list[list[float]],
    low: float,
    high: float,
    annotated: bool,
) -> None:
    """Draw an image with a colour bar, and numbers in its cells if there is room."""
    axes.grid(False)
    image = axes.imshow(values, cmap="cividis", vmin=low, vmax=high, interpolation="none", aspect="equal")
    bar = figure.colorbar(image, ax=axes, fraction=0.046)
    bar.ax.tick_params(color=drawing.FOREGROUND, labelcolor=drawing.FOREGROUND, labelsize=8.5)
    bar.outline.set_visible(False)
    drawing.limit_ticks(axes, integers=True)
    drawing.limit_ticks(axes, integers=True, x=False)
    if not annotated:
        return
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value == value:  # not nan
                # the colours of the map do not follow the theme, so neither does what stands on them
                colour = "#101112" if value > (low + high) / 2 else "#f0f1f2"
                axes.text(column, row, f"{value:.2f}", color=colour, ha="center", va="center", fontsize=7.5)
