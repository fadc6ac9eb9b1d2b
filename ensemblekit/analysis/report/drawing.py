"""Drawing: matplotlib's figures as inline SVG whose text stays text and whose colours follow the page's theme.

Artists are marked by their group id: `series-2` shows column 2 of the chart's table, `cell-3-1` its row 3 in column 1,
`member-4` a line of member 4. In the page these become the attributes `data-column`, `data-cell` and `data-member`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

FOREGROUND, GRID = "#010203", "#d0d0d1"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Colours of Okabe and Ito (2008), which colour-blind readers can tell apart."""
MARKERS = ("o", "s", "^", "D", "v")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))
MEMBER_COLOUR = "#8a8a8b"
WIDTH = 4.5
"""Inches, at 72 units of SVG each: text of 9 units stays readable on a phone."""
_UNITS_PER_INCH = 72
_VARIABLES = {
    FOREGROUND: "currentColor",
    GRID: "var(--grid)",
    MEMBER_COLOUR: "var(--member)",
    "#000000": "currentColor",
    "#555555": "var(--member)",
    "#e6e6e6": "var(--grid)",
}
_VARIABLES |= {colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ensemblekit",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "path.simplify": True,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
}
MOST_MARKERS = 40
LARGEST_SCALE = 1.6
"""Figures are not enlarged by more than this, or their text would be larger than the page's."""


def new_figure(height: float = 3.2, columns: int = 1, width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """Make a figure with axes side by side; no global state is used."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    for panel in axes:
        style_axes(panel)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Give axes the colours of the theme, a light grid and no frame."""
    axes.patch.set_alpha(0)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(FOREGROUND)
        spine.set_linewidth(0.8)
    axes.tick_params(color=FOREGROUND, labelcolor=FOREGROUND, width=0.8)


def series(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float | None],
    label: str,
    style: int,
    column: int,
    **options: Any,
) -> None:
    """Draw a line with markers; points without a value are left out.

    Args:
        axes: where to draw.
        x: the positions, one for each row of the chart's table.
        y: the values.
        label: for the legend.
        style: which colour, marker and dashes.
        column: the column of the table that has the values.
        options: further ones of `Axes.plot`.
    """
    rows = [row for row, value in enumerate(y) if value is not None and math.isfinite(value)]
    if not rows:
        return
    marked = len(rows) <= MOST_MARKERS
    gid = f"series-{column}" if len(rows) == len(y) else f"series-{column}-{'.'.join(map(str, rows))}"
    look: dict[str, Any] = {
        "color": SERIES[style % len(SERIES)],
        "linestyle": DASHES[style % len(DASHES)],
        "marker": MARKERS[style % len(MARKERS)],
        "markersize": 4 if marked else 3,
        "markevery": 1 if marked else max(1, len(rows) // 12),
        "linewidth": 1.5,
    } | options
    if not marked:
        every = look["markevery"]
        gid = f"series-{column}-{'.'.join(str(row) for row in rows[::every])}"
    axes.plot([x[row] for row in rows], [y[row] for row in rows], label=label, gid=gid, **look)  # type: ignore[arg-type]


def legend(axes: Axes, **options: Any) -> None:
    """Add a legend without a frame, if there is anything to explain."""
    if axes.get_legend_handles_labels()[0]:
        with matplotlib.rc_context(_STYLE):
            axes.legend(frameon=False, labelcolor=FOREGROUND, **options)


def legend_below(figure: Figure, columns: int = 2) -> None:
    """Add a legend below everything, where it hides nothing."""
    with matplotlib.rc_context(_STYLE):
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            labelcolor=FOREGROUND,
            handlelength=2.6,
        )


def limit_ticks(axes: Axes, integers: bool = False, x: bool = True) -> None:
    """Use few ticks, and only whole numbers if these are counted."""
    from matplotlib.ticker import MaxNLocator

    (axes.xaxis if x else axes.yaxis).set_major_locator(MaxNLocator(6, integer=integers))


def as_plain_text(axes: Axes) -> None:
    """Keep matplotlib from reading dollar signs in the names at the ticks as formulas."""
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """Render a figure as an SVG element for an HTML page; equal figures give equal text.

    Args:
        figure: the figure.
        name: prefix of all ids, so that several figures fit on one page.
        title: the accessible name.
        description: the text alternative.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        _lay_out(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    start = svg.index("<svg")
    opening_end = svg.index(">", start)
    view_box = re.search(r'viewBox="([^"]+)"', svg[start:opening_end])
    body = svg[opening_end + 1 :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = _themed(_with_data_attributes(_with_prefix(body, name)))
    box = view_box.group(1) if view_box else "0 0 324 230"
    width = round(LARGEST_SCALE * float(box.split()[2]))
    label = escape(f"{title}. {description}", {'"': "&quot;"})
    opening = f'<svg class="figure" role="img" aria-label="{label}" viewBox="{box}" style="max-width: {width}px">'
    return f"{opening}<title>{escape(title)}</title><desc>{escape(description)}</desc>{body.strip()}"


def _lay_out(figure: Figure) -> None:
    """Fix the layout of a figure for SVG: savefig would draw the whole figure a second time to find it."""
    layout = figure.get_layout_engine()
    if layout is not None:
        FigureCanvasSVG(figure)  # becomes the figure's own: text is measured as SVG
        figure.set_dpi(_UNITS_PER_INCH)
        layout.execute(figure)
        figure.set_layout_engine(None)


def _with_prefix(svg: str, name: str) -> str:
    """Make ids unique on the page, and remove those of the layout, which nothing refers to."""
    svg = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|\w*Collection)_\d+"', "", svg
    )
    svg = re.sub(r'(\sid="|url\(#|href="#)', rf"\1{name}-", svg)
    return re.sub(r"\n\s*", "\n", svg)


def _with_data_attributes(svg: str) -> str:
    """Turn the group ids of marked artists into attributes."""
    svg = re.sub(r'id="[\w-]*?-series-(\d+)-([\d.]+)"', r'data-column="\1" data-rows="\2"', svg)
    svg = re.sub(r'id="[\w-]*?-series-(\d+)"', r'data-column="\1"', svg)
    svg = re.sub(r'id="[\w-]*?-cell-(\d+-\d+)"', r'data-cell="\1"', svg)
    return re.sub(r'id="[\w-]*?-member-(\d+)"', r'data-member="\1"', svg)


def _themed(svg: str) -> str:
    """Replace colours by variables of the page's style sheet, and fonts by the page's font."""
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: _VARIABLES.get(found[0], found[0]), svg)
    svg = re.sub(r"font: (?:[\w.]+ )*?([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
