"""Confidence: how well probabilities match what happens, and how errors fall when uncertain samples are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import Chart, DataTable, number, percent
from ensemblekit.core.metrics import ECE_BINS
from ensemblekit.core.selective_prediction import RiskCoverage

COVERAGES = 50
"""Points of a drawn risk–coverage curve."""
MOST_MEMBER_LINES = 32
LEAST_IN_BIN = 5
"""Samples in a bin of a member's reliability diagram; fewer are noise that hides the rest."""


@dataclass(frozen=True)
class Reliability:
    """Samples by confidence, in bins of equal width that are open on the left: (a, b]."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    confidence: tuple[float | None, ...]
    """Mean confidence in each bin; None if it is empty."""
    accuracy: tuple[float | None, ...]
    error: float
    """The expected calibration error."""

    @property
    def over_confident(self) -> bool:
        """Whether the mean confidence is above the accuracy."""
        pairs = zip(self.counts, self.confidence, self.accuracy, strict=True)
        return sum(count * (sure - right) for count, sure, right in pairs if sure is not None and right is not None) > 0


def reliability(confidence: Tensor, correct: Tensor, bins: int = ECE_BINS) -> Reliability:
    """Sort samples into bins by their confidence (N,); `correct` (N,) says which are right."""
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    counts = bin_of.bincount(minlength=bins)
    sure = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of, confidence.double())
    right = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of, correct.double())
    return Reliability(
        edges=tuple(index / bins for index in range(bins + 1)),
        counts=tuple(counts.tolist()),
        confidence=tuple(_ratio(total, count) for total, count in zip(sure.tolist(), counts.tolist(), strict=True)),
        accuracy=tuple(_ratio(total, count) for total, count in zip(right.tolist(), counts.tolist(), strict=True)),
        error=float((right - sure).abs().sum() / len(confidence)),
    )


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None


@dataclass(frozen=True)
class Histogram:
    """Numbers of right and wrong predictions by uncertainty."""

    edges: tuple[float, ...]
    right: tuple[int, ...]
    wrong: tuple[int, ...]


def uncertainty_histogram(uncertainty: Tensor, correct: Tensor, bins: int = 20) -> Histogram:
    """Count right and wrong predictions in bins of equal width over the range of the uncertainty (N,)."""
    low = float(uncertainty.min())
    width = max(float(uncertainty.max()) - low, 1e-9) / bins
    bin_of = ((uncertainty.double() - low) / width).long().clamp(0, bins - 1)
    counts = [bin_of[chosen].bincount(minlength=bins).tolist() for chosen in (correct.bool(), ~correct.bool())]
    return Histogram(tuple(low + width * index for index in range(bins + 1)), tuple(counts[0]), tuple(counts[1]))


def reliability_chart(ensemble: Reliability, members: Sequence[Reliability]) -> Chart:
    """Draw accuracy against confidence, with the number of samples in each bin."""
    figure, (axes,) = drawing.new_figure(3.4)
    shown = members[:MOST_MEMBER_LINES] if len(members) > 1 else []
    axes.plot([0, 1], [0, 1], color=drawing.FOREGROUND, linewidth=0.8, linestyle=":", label="perfectly calibrated")
    for index, member in enumerate(shown):
        bins = zip(member.confidence, member.accuracy, member.counts, strict=True)
        points = [(x, y) for x, y, count in bins if count >= LEAST_IN_BIN]
        if not points:
            continue
        label = "members" if index == 0 else None
        axes.plot(
            *zip(*points, strict=True), color=drawing.MEMBER_COLOUR, linewidth=0.7, label=label, gid=f"member-{index}"
        )
    centres = [x if x is not None else 0.0 for x in ensemble.confidence]
    drawing.series(axes, centres, ensemble.accuracy, "ensemble", 0, 4)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("confidence", color=drawing.FOREGROUND)
    axes.set_ylabel("accuracy", color=drawing.FOREGROUND)
    drawing.legend(axes, loc="upper left")
    direction = "over-confident" if ensemble.over_confident else "under-confident"
    summary = f"expected calibration error {number(ensemble.error)}, on the whole {direction}"
    return Chart(
        name="reliability",
        title="Reliability diagram",
        caption=f"Accuracy of the predictions of about the same confidence: {summary}. Points below the diagonal are "
        f"over-confident.",
        description=f"Accuracy against confidence in {len(ensemble.counts)} bins; {summary}.",
        figure=figure,
        table=_reliability_table(ensemble, shown),
    )


def _reliability_table(ensemble: Reliability, members: Sequence[Reliability]) -> DataTable:
    columns = ("from", "to", "samples", "confidence", "accuracy", *(f"member {i}" for i in range(len(members))))
    rows = zip(
        ensemble.edges[:-1],
        ensemble.edges[1:],
        ensemble.counts,
        ensemble.confidence,
        ensemble.accuracy,
        *(member.accuracy for member in members),
        strict=True,
    )
    return DataTable.of(columns, rows)


def risk_chart(ensemble: RiskCoverage, members: Sequence[RiskCoverage]) -> Chart:
    """Draw the error of the most confident samples against their share."""
    points = min(COVERAGES, len(ensemble.risk))
    coverages = [(index + 1) / points for index in range(points)]
    shown = members[:MOST_MEMBER_LINES] if len(members) > 1 else []
    figure, (axes,) = drawing.new_figure(3.4)
    for index, member in enumerate(shown):
        values = [float(member.risk_at(coverage)) for coverage in coverages]
        label = "members" if index == 0 else None
        axes.plot(coverages, values, color=drawing.MEMBER_COLOUR, linewidth=0.7, label=label, gid=f"member-{index}")
    drawing.series(axes, coverages, [float(ensemble.risk_at(coverage)) for coverage in coverages], "ensemble", 0, 1)
    axes.axhline(
        float(ensemble.risk_at(1)), color=drawing.FOREGROUND, linewidth=0.8, linestyle=":", label="without selection"
    )
    axes.set_xlim(0, 1.01)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of samples kept, the most confident first", color=drawing.FOREGROUND)
    axes.set_ylabel("error", color=drawing.FOREGROUND)
    drawing.legend(axes, loc="upper left")
    columns = ("coverage", "ensemble", *(f"member {index}" for index in range(len(shown))))
    rows = [(coverage, *(float(curve.risk_at(coverage)) for curve in (ensemble, *shown))) for coverage in coverages]
    half, full = percent(float(ensemble.risk_at(0.5))), percent(float(ensemble.risk_at(1)))
    return Chart(
        name="risk-coverage",
        title="Risk–coverage curve",
        caption=f"Error if only the most confident predictions are kept: {full} of all, {half} of the more confident "
        f"half. The area under the curve (AURC) is {number(float(ensemble.area))}; less is better.",
        description=f"The error falls from {full} on all samples to {half} on the more confident half.",
        figure=figure,
        table=DataTable.of(columns, rows),
    )


def histogram_chart(histogram: Histogram) -> Chart:
    """Draw the shares of right and of wrong predictions by their uncertainty."""
    figure, (axes,) = drawing.new_figure()
    width = histogram.edges[1] - histogram.edges[0]
    totals = max(sum(histogram.right), 1), max(sum(histogram.wrong), 1)
    groups = ((histogram.right, "right", "", -1), (histogram.wrong, "wrong", "////", 1))
    for column, (counts, label, hatch, side) in enumerate(groups, start=2):
        shares = [count / totals[column - 2] for count in counts]
        centres = [edge + width / 2 + side * width * 0.21 for edge in histogram.edges[:-1]]
        bars = axes.bar(
            centres,
            shares,
            width * 0.42,
            color=drawing.SERIES[column - 2],
            label=f"{label} ({sum(counts):,})",
            hatch=hatch,
            edgecolor=drawing.FOREGROUND if hatch else "none",
            linewidth=0,
        )
        for row, bar in enumerate(bars):
            bar.set_gid(f"cell-{row}-{column}")
    axes.set_xlabel("predictive entropy, nats", color=drawing.FOREGROUND)
    axes.set_ylabel("share of the predictions", color=drawing.FOREGROUND)
    drawing.legend(axes)
    medians = _median_bin(histogram.right), _median_bin(histogram.wrong)
    texts = [number(histogram.edges[index] + width / 2) if index is not None else "–" for index in medians]
    rows = zip(histogram.edges[:-1], histogram.edges[1:], histogram.right, histogram.wrong, strict=True)
    return Chart(
        name="uncertainty",
        title="Uncertainty of right and wrong predictions",
        caption="A useful uncertainty is low for right and high for wrong predictions: the less the two overlap, the "
        "better errors can be foreseen.",
        description=f"Histogram of the entropy; its median is about {texts[0]} for right, {texts[1]} for wrong ones.",
        figure=figure,
        table=DataTable.of(("from", "to", "right", "wrong"), rows),
    )


def _median_bin(counts: Sequence[int]) -> int | None:
    """Return the bin in which half of the counts are reached; None if there are none."""
    total, reached = sum(counts), 0
    for index, count in enumerate(counts):
        reached += count
        if total and 2 * reached >= total:
            return index
    return None
