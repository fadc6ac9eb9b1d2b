"""The figure of a comparison: measures against λ, or another key, with a column of panels for each base model.

Laid out as the figures of Buschjäger et al. 2020. Uses matplotlib's objects only: no global state, no windows.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ensemblekit.analysis.figure_files import FORMATS, check_figure_file
from ensemblekit.analysis.figure_layout import MAX_LABEL, Column, Layout, Series, lay_out
from ensemblekit.analysis.groups import check_keys
from ensemblekit.analysis.measures import MEASURES
from ensemblekit.core.errors import UsageError, choices
from ensemblekit.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ensemblekit.analysis.comparison import Cell, Comparison

DEFAULT_ROWS = ("accuracy", "mse", "diversity", "mean_member_accuracy", "mean_member_mse", "train_loss")
"""The measures of the figure; those of the other task are left out."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which people with any colour vision can tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SINGLE_COLOUR = "#555555"
SETTINGS: Any = {
    "text.parse_math": False,  # names of plugins and values of specs are not formulas
    "svg.fonttype": "none",
    "svg.hashsalt": "ensemblekit",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def write_figure(comparison: Comparison, path: Path, x: str | None = None, rows: Sequence[str] | None = None) -> Path:
    """Draw a comparison to a file; see `Comparison.plot`."""
    check_figure_file(path)
    suffix = path.suffix.lower()
    content = io.BytesIO()
    with rc_context(SETTINGS):
        figure = draw(comparison, x, rows)
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=dict(FORMATS[suffix]))
    with atomic_write(path) as staged:
        staged.write_bytes(content.getvalue())
    return path


def draw(comparison: Comparison, x: str | None = None, rows: Sequence[str] | None = None) -> Figure:
    """Draw a comparison; arguments as for `Comparison.plot`."""
    measures = _measures(comparison, rows)
    if x is not None:
        check_keys([x], [run.spec for group in comparison.groups for run in group.runs], "--x")
    layout = lay_out(comparison, x)
    num_rows, num_columns = len(measures), len(layout.columns)
    width = max(5.0, min(1.0 + num_columns * (2.2 + 0.2 * len(layout.slots)), 30.0))
    figure = Figure(figsize=(width, 1.2 + 1.7 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey="row", squeeze=False)
    for row, name in enumerate(measures):
        for index, column in enumerate(layout.columns):
            axes: Axes = panels[row][index]
            _panel(axes, column, name, layout)
            if index == 0:
                axes.set_ylabel(_row_title(name))
            if row == 0:
                axes.set_title(plain(column.label))
            if row == num_rows - 1:
                _label_x_axis(axes, layout)
    handles, labels = _legend_entries(panels)
    if len(labels) > 1 or "single network" in labels:
        figure.legend(
            handles, labels, loc="outside upper center", ncols=min(len(labels), 2 + num_columns), frameon=False
        )
    return figure


def _measures(comparison: Comparison, rows: Sequence[str] | None) -> list[str]:
    known = [name for name in MEASURES if any(name in group.cells for group in comparison.groups)]
    if rows is None:
        return [name for name in DEFAULT_ROWS if name in known]
    for name in rows:
        if name not in known:
            raise UsageError(f'no measure "{name}"', "--rows", choices(name, known))
    if not rows:
        raise UsageError("no measures", "--rows", choices("", known))
    return list(dict.fromkeys(rows))


def _panel(axes: Axes, column: Column, name: str, layout: Layout) -> None:
    """Draw one measure for one base model."""
    factor = 100.0 if MEASURES[name].unit == "%" else 1.0
    for group in column.single:
        if (cell := group.cells.get(name)) is not None:
            _horizontal_line(axes, cell, factor)
    for series in column.series:
        style = layout.series_labels.index(series.label)
        _line(axes, series, name, factor, style)
    for point in column.marks:
        style = len(layout.series_labels) + layout.slots.index(point.label)
        if (cell := point.group.cells.get(name)) is not None:
            axes.errorbar(
                [point.position],
                [factor * cell.mean],
                yerr=[factor * (cell.std or 0.0)],
                color=COLOURS[style % len(COLOURS)],
                marker=MARKERS[style % len(MARKERS)],
                linestyle="none",
                markersize=5.5,
                capsize=2.5,
            )
    if layout.boundary is not None:
        axes.axvline(layout.boundary, color="#bbbbbb", linewidth=0.8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(y=0.12)


def _line(axes: Axes, series: Series, name: str, factor: float, style: int) -> None:
    points = [(point, cell) for point in series.points if (cell := point.group.cells.get(name)) is not None]
    if not points:
        return
    colour, marker = COLOURS[style % len(COLOURS)], MARKERS[style % len(MARKERS)]
    positions = [point.position for point, _ in points]
    means = [factor * cell.mean for _, cell in points]
    spreads = [factor * (cell.std or 0.0) for _, cell in points]
    axes.plot(positions, means, color=colour, marker=marker, markersize=4, linewidth=1.5, label=plain(series.label))
    if any(spreads):
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        if len(points) == 1:
            axes.errorbar(positions, means, yerr=spreads, color=colour, capsize=2.5, linestyle="none")
        axes.fill_between(positions, low, high, color=colour, alpha=0.2, linewidth=0)


def _horizontal_line(axes: Axes, cell: Cell, factor: float) -> None:
    mean, std = factor * cell.mean, factor * (cell.std or 0.0)
    axes.axhline(mean, color=SINGLE_COLOUR, linestyle="--", linewidth=1.2, label="single network")
    if std:
        axes.axhspan(mean - std, mean + std, color=SINGLE_COLOUR, alpha=0.12, linewidth=0)


def _label_x_axis(axes: Axes, layout: Layout) -> None:
    if layout.slots and layout.x_title:  # below the numbers, not below the names beside them
        middle = sum(layout.number_range) / 2
        axes.annotate(
            plain(layout.x_title),
            (middle, 0),
            (0, -22),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
        )
    else:
        axes.set_xlabel(plain(layout.x_title))
    axes.set_xticks([position for position, _ in layout.ticks], [plain(label) for _, label in layout.ticks])
    names = {plain(label) for label in layout.slots}
    for label in axes.get_xticklabels():
        if label.get_text() in names:
            label.set(rotation=40, ha="right", rotation_mode="anchor")
    low, high = layout.limits
    axes.set_xlim(low, high)


def _row_title(name: str) -> str:
    measure = MEASURES[name]
    title = {"accuracy": "ensemble accuracy", "mse": "ensemble MSE"}.get(name, measure.title)
    title = {"mean_member_accuracy": "mean member\naccuracy", "mean_member_mse": "mean member\nMSE"}.get(name, title)
    title = {"ensemble accuracy": "ensemble\naccuracy"}.get(title, title)
    return f"{title} [{measure.unit}]" if measure.unit else title


def _legend_entries(panels: Any) -> tuple[list[Any], list[str]]:
    """Return one entry for each label of all panels."""
    found: dict[str, Any] = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def plain(text: str) -> str:
    """Return a text that can be shown: one line, printable, not too long."""
    shown = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return shown if len(shown) <= MAX_LABEL else f"{shown[: MAX_LABEL - 1]}…"
