"""Classes: which are taken for which, and how accurate each one is."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import Chart, DataTable, percent
from ensemblekit.analysis.report.predictions import Predictions
from ensemblekit.core.confusion import class_report, confusion_matrix
from ensemblekit.core.streams import printable

MOST_CLASSES = 100
"""Confusion matrices of more classes are shown by their most frequent confusions only."""
MOST_NAMED, MOST_DRAWN, MOST_LETTERS = 12, 40, 14


def confusion_chart(predictions: Predictions) -> Chart:
    """Draw how often each class was predicted for each true class."""
    num_classes = len(predictions.classes)
    counts = confusion_matrix(predictions.predicted, predictions.targets, num_classes)
    figure, (axes,) = drawing.new_figure(4.2)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
    axes.grid(False)
    # the square root shows rare confusions too
    image = axes.imshow(shares.sqrt().tolist(), cmap="cividis", vmin=0, vmax=1, interpolation="none")
    bar = figure.colorbar(image, ax=axes, fraction=0.046, ticks=[0, 0.1**0.5, 0.5**0.5, 1])
    bar.ax.set_yticklabels(["0", "10 %", "50 %", "100 %"])
    bar.ax.tick_params(color=drawing.FOREGROUND, labelcolor=drawing.FOREGROUND, labelsize=8.5)
    bar.outline.set_visible(False)
    _name_ticks(axes, predictions.classes)
    if num_classes <= MOST_NAMED:
        _write_counts(axes, counts, shares)
    axes.set_xlabel("predicted class", color=drawing.FOREGROUND)
    axes.set_ylabel("true class", color=drawing.FOREGROUND)
    pairs = frequent_confusions(counts, predictions.classes, 5)
    most = "; ".join(f"{true} as {taken} ({count})" for true, taken, count in pairs)
    summary = f"Most frequent confusions: {most}." if pairs else "There are no confusions."
    return Chart(
        name="confusion",
        title="Confusion matrix",
        caption=f"Share of the samples of each true class (row) by predicted class (column). {summary}",
        description=f"Heat map of {num_classes} by {num_classes} classes. {summary}",
        figure=figure,
        table=_confusion_table(counts, predictions.classes),
    )


def _name_ticks(axes: Axes, names: tuple[str, ...]) -> None:
    """Write the names of few classes at the axes; of many, only some indices."""
    if len(names) > MOST_NAMED:
        drawing.limit_ticks(axes, integers=True)
        drawing.limit_ticks(axes, integers=True, x=False)
        return
    short = [plain_text(name) for name in names]
    turned = max(map(len, short)) > 2
    axes.set_xticks(range(len(names)), short, rotation=60 if turned else 0, ha="right" if turned else "center")
    axes.set_yticks(range(len(names)), short)
    drawing.as_plain_text(axes)


def plain_text(name: str, most: int = MOST_LETTERS) -> str:
    """Shorten a name for a figure, with its control characters made visible."""
    visible = printable(name)
    return visible if len(visible) <= most else f"{visible[: most - 1]}…"


def _write_counts(axes: Axes, counts: Tensor, shares: Tensor) -> None:
    for row, line in enumerate(counts.tolist()):
        for column, count in enumerate(line):
            if count:
                colour = "#101112" if float(shares[row, column]) > 0.3 else "#f0f1f2"
                axes.text(column, row, str(count), color=colour, ha="center", va="center", fontsize=7)


def frequent_confusions(counts: Tensor, names: tuple[str, ...], most: int) -> list[tuple[str, str, int]]:
    """Return the most frequent pairs of a true and a wrongly predicted class, with their counts."""
    wrong = counts - torch.diag(counts.diagonal())
    ranked = wrong.flatten().sort(descending=True, stable=True)
    pairs = zip(ranked.indices[:most].tolist(), ranked.values[:most].tolist(), strict=True)
    return [(names[index // len(names)], names[index % len(names)], count) for index, count in pairs if count]


def _confusion_table(counts: Tensor, names: tuple[str, ...]) -> DataTable:
    if len(names) > MOST_CLASSES:
        return DataTable.of(("true class", "predicted class", "samples"), frequent_confusions(counts, names, 200))
    rows = [(name, *row) for name, row in zip(names, counts.tolist(), strict=True)]
    return DataTable.of(("true \\ predicted", *names), rows, "matrix")


def class_chart(predictions: Predictions) -> Chart:
    """Draw the accuracy of each class; of many classes only the least and the most accurate ones."""
    counts = confusion_matrix(predictions.predicted, predictions.targets, len(predictions.classes))
    report = [row for row in class_report(counts, predictions.classes) if row["recall"] is not None]
    members = predictions.member_correct.double().mean(dim=0)
    rows = [
        (
            row["class"],
            row["count"],
            row["recall"],
            _mean_of(members, predictions.targets, row["class"], predictions.classes),
        )
        for row in report
    ]
    ranked = sorted(rows, key=lambda row: row[2])
    drawn = ranked if len(ranked) <= MOST_DRAWN else ranked[: MOST_DRAWN // 2] + ranked[-MOST_DRAWN // 2 :]
    figure, (axes,) = drawing.new_figure(max(2.4, 0.17 * len(drawn) + 1.0))
    index_of = {row[0]: index for index, row in enumerate(rows)}
    looks: list[tuple[str, dict[str, Any]]] = [
        ("ensemble", {"marker": "o", "color": drawing.SERIES[0], "markersize": 5}),
        ("mean member", {"marker": "D", "color": drawing.SERIES[1], "markersize": 3.5, "markerfacecolor": "none"}),
    ]
    for position, (name, _, recall, mean) in enumerate(drawn):
        axes.plot([recall, mean], [position, position], color=drawing.GRID, linewidth=2)
        for column, (value, (label, look)) in enumerate(zip((recall, mean), looks, strict=True), start=2):
            gid = f"cell-{index_of[name]}-{column}"
            axes.plot([value], [position], linestyle="", label=label if position == 0 else None, gid=gid, **look)
    axes.set_yticks(range(len(drawn)), [plain_text(row[0]) for row in drawn])
    drawing.as_plain_text(axes)
    axes.tick_params(axis="y", labelsize=7.5)
    axes.set_ylim(-0.6, len(drawn) - 0.4)
    axes.set_xlim(right=1.01)
    axes.set_xlabel("accuracy", color=drawing.FOREGROUND)
    drawing.legend_below(figure)
    worst = ", ".join(f"{name} ({percent(recall, 1)})" for name, _, recall, _ in ranked[:3])
    some = (
        f" Shown are the {MOST_DRAWN // 2} lowest and the {MOST_DRAWN // 2} highest of {len(ranked)}."
        if drawn != ranked
        else ""
    )
    return Chart(
        name="class-accuracy",
        title="Accuracy of each class",
        caption="Share of the samples of a class that are predicted right (recall), by the ensemble and by the mean "
        f"member. Lowest: {worst}.{some}",
        description=f"Dot chart of {len(drawn)} classes. Lowest: {worst}.",
        figure=figure,
        table=DataTable.of(("class", "samples", "ensemble", "mean member"), rows),
    )


def _mean_of(values: Tensor, targets: Tensor, name: str, names: tuple[str, ...]) -> float:
    return float(values[targets == names.index(name)].mean())
