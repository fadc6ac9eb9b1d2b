"""Regression: predicted against true values, residuals, and whether the members' spread foresees errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import Chart, DataTable, number

MOST_POINTS = 400
"""Larger test sets are shown by so many samples, evenly spaced by their true value."""
SPREAD_BINS = 10


@dataclass(frozen=True)
class ValuePredictions:
    """Values that the members and the ensemble predict, one column of the targets, in its own units."""

    targets: Tensor
    """float64 (N,)."""
    predicted: Tensor
    """Of the ensemble, (N,)."""
    members: Tensor
    """Of each member, (M, N)."""

    @property
    def residuals(self) -> Tensor:
        """Predicted minus true values, (N,)."""
        return self.predicted - self.targets

    @property
    def spread(self) -> Tensor:
        """Standard deviation over the members, (N,)."""
        return self.members.std(dim=0, correction=0)

    @property
    def shown(self) -> Tensor:
        """Indices of the samples that a scatter plot shows, in order of their true values."""
        order = self.targets.argsort(stable=True)
        if len(order) <= MOST_POINTS:
            return order
        return order[torch.linspace(0, len(order) - 1, MOST_POINTS).round().long()]


def value_charts(values: ValuePredictions, name: str) -> list[Chart]:
    """Draw all charts of one target; `name` tells several targets apart and may be empty."""
    charts = [_scatter_chart(values), _residual_chart(values)]
    if len(values.members) > 1:
        charts.append(_spread_chart(values))
    return charts if not name else [_renamed(chart, name) for chart in charts]


def _renamed(chart: Chart, name: str) -> Chart:
    from dataclasses import replace

    return replace(chart, name=f"{chart.name}-{name}", title=f"{chart.title}: target {name}")


def _scatter_chart(values: ValuePredictions) -> Chart:
    shown = values.shown
    true, predicted = values.targets[shown].tolist(), values.predicted[shown].tolist()
    figure, (axes,) = drawing.new_figure(3.6)
    ends = [min(true + predicted), max(true + predicted)]
    axes.plot(ends, ends, color=drawing.FOREGROUND, linewidth=0.8, linestyle=":", label="exact")
    axes.plot(true, predicted, "o", color=drawing.SERIES[0], markersize=3, alpha=0.6, label="ensemble", gid="series-1")
    axes.set_xlabel("true value", color=drawing.FOREGROUND)
    axes.set_ylabel("predicted value", color=drawing.FOREGROUND)
    drawing.legend(axes)
    correlation = float(torch.corrcoef(torch.stack([values.targets, values.predicted]))[0, 1])
    return Chart(
        name="predicted",
        title="Predicted against true values",
        caption=f"Points on the dotted line are exact. Correlation: {number(correlation)}.{_sample_note(values)}",
        description=f"Scatter plot of {len(shown)} samples; the correlation is {number(correlation)}.",
        figure=figure,
        table=DataTable.of(("true", "predicted"), zip(true, predicted, strict=True)),
    )


def _sample_note(values: ValuePredictions) -> str:
    total, shown = len(values.targets), len(values.shown)
    return f" Shown are {shown} of {total:,} samples." if shown < total else ""


def _residual_chart(values: ValuePredictions, bins: int = 24) -> Chart:
    residuals = values.residuals
    low, high = float(residuals.min()), float(residuals.max())
    high = high if high > low else low + 1
    counts = torch.histc(residuals, bins, low, high).long().tolist()
    width = (high - low) / bins
    edges = [low + width * index for index in range(bins + 1)]
    figure, (axes,) = drawing.new_figure()
    bars = axes.bar([edge + width / 2 for edge in edges[:-1]], counts, width * 0.94, color=drawing.SERIES[0])
    for row, bar in enumerate(bars):
        bar.set_gid(f"cell-{row}-2")
    mean, deviation = float(residuals.mean()), float(residuals.std(correction=0))
    axes.axvline(0, color=drawing.FOREGROUND, linewidth=0.8, linestyle=":")
    axes.axvline(
        mean, color=drawing.SERIES[1], linewidth=1.3, linestyle=drawing.DASHES[1], label=f"mean {number(mean)}"
    )
    axes.set_xlabel("residual: predicted − true", color=drawing.FOREGROUND)
    axes.set_ylabel("samples", color=drawing.FOREGROUND)
    drawing.legend(axes)
    summary = f"mean {number(mean)}, standard deviation {number(deviation)}"
    return Chart(
        name="residuals",
        title="Residuals",
        caption=f"How far predictions are from the true values: {summary}. A mean far from 0 is a bias.",
        description=f"Histogram of the residuals: {summary}.",
        figure=figure,
        table=DataTable.of(("from", "to", "samples"), zip(edges[:-1], edges[1:], counts, strict=True)),
    )


@dataclass(frozen=True)
class SpreadBins:
    """Samples by the members' spread, in bins of equal size."""

    spread: tuple[float, ...]
    """Root mean square of the spread in each bin."""
    error: tuple[float, ...]
    """Root mean squared error in each bin."""
    counts: tuple[int, ...]


def spread_bins(spread: Tensor, residuals: Tensor, bins: int = SPREAD_BINS) -> SpreadBins:
    """Sort samples (N,) by their spread into bins of equal size, and compare it with the error."""
    groups = spread.argsort(stable=True).tensor_split(min(bins, len(spread)))
    return SpreadBins(
        tuple(float(spread[group].square().mean().sqrt()) for group in groups),
        tuple(float(residuals[group].square().mean().sqrt()) for group in groups),
        tuple(len(group) for group in groups),
    )


def _spread_chart(values: ValuePredictions) -> Chart:
    binned = spread_bins(values.spread, values.residuals)
    figure, (axes,) = drawing.new_figure(3.4)
    end = max(*binned.spread, 1e-12)
    axes.plot([0, end], [0, end], color=drawing.FOREGROUND, linewidth=0.8, linestyle=":", label="error = spread")
    drawing.series(axes, binned.spread, binned.error, "samples of about the same spread", 0, 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("standard deviation over the members", color=drawing.FOREGROUND)
    axes.set_ylabel("root mean squared error", color=drawing.FOREGROUND)
    drawing.legend(axes)
    ranks = torch.stack(
        [values.spread.argsort().argsort().double(), values.residuals.abs().argsort().argsort().double()]
    )
    correlation = float(torch.corrcoef(ranks)[0, 1])
    return Chart(
        name="spread",
        title="Members' spread against the error",
        caption=f"If the error rises with the spread, the members' disagreement tells which predictions to trust. Rank "
        f"correlation with the absolute error: {number(correlation)}.",
        description=f"Error in {len(binned.counts)} bins of spread; the rank correlation is {number(correlation)}.",
        figure=figure,
        table=DataTable.of(
            ("samples", "spread", "error"), zip(binned.counts, binned.spread, binned.error, strict=True)
        ),
    )
