"""A comparison as text: cells for people, CSV, Markdown, LaTeX with booktabs, and HTML for notebooks."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemblekit.analysis.groups import text_of
from ensemblekit.analysis.measures import MEASURES, Measure

if TYPE_CHECKING:
    from ensemblekit.analysis.comparison import Cell, Comparison, Group

SIGNS = {"best": "*", "within noise": "≈", None: ""}
LEGEND = "* best, beyond noise   ≈ not distinguishable from the best   (95 % intervals, paired bootstrap)"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "²": r"$^2$",
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "–": "--",
    "−": "$-$",
    "λ": r"$\lambda$",
    "µ": r"$\mu$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def title_of(name: str) -> str:
    """Return the title of a column, with its unit."""
    measure = MEASURES[name]
    return f"{measure.title} [{measure.unit}]" if measure.unit else measure.title


def cell_text(cell: Cell | None, measure: Measure, sign: bool = True) -> str:
    """Write a mean ± standard deviation, with the sign of its mark: `97.2 ± 0.3 *`."""
    if cell is None:
        return "–"
    text = value_text(cell.mean, measure)
    if cell.std is not None and cell.std > 0:
        text += f" ± {value_text(cell.std, measure, cell.mean)}"
    return f"{text} {SIGNS[cell.mark]}".rstrip() if sign else text


def value_text(value: float, measure: Measure, reference: float | None = None) -> str:
    """Write a value in the unit of its measure, with the digits of a reference value if there is one."""
    factor = 100.0 if measure.unit == "%" else 1.0
    value, reference = value * factor, abs(value if reference is None else reference) * factor
    if measure.unit == "%":
        return f"{value:.2f}"
    if measure.title == "parameters":
        return f"{value:,.0f}"
    if reference >= 1000:
        return f"{value:,.0f}"
    decimals = 1 if reference >= 100 else 2 if reference >= 10 else 3 if reference >= 0.01 or reference == 0 else 5
    return f"{value:.{decimals}f}" if reference == 0 or reference >= 1e-4 else f"{value:.2e}"


def difference_text(cell: Cell | None, measure: Measure) -> str:
    """Write the difference from the best group with its 95 % interval: `-1.13 [-2.54, 0.28]`."""
    if cell is None or cell.is_leading:
        return "–"
    numbers = [cell.difference] + ([cell.interval.low, cell.interval.high] if cell.interval else [])
    first, *ends = (value_text(number, measure, max(map(abs, numbers))) for number in numbers)
    return f"{first} [{', '.join(ends)}]" if ends else first


def text_table(comparison: Comparison, columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows of a table of some measures; the primary one is followed by its difference."""
    titles = ["group", "runs"]
    for name in columns:
        titles.append(title_of(name))
        if name == comparison.primary and len(comparison.groups) > 1:
            titles.append("difference [95 % interval]")
    return titles, [_text_row(comparison, group, columns) for group in comparison.groups]


def _text_row(comparison: Comparison, group: Group, columns: Sequence[str]) -> list[str]:
    row = [group.label, str(len(group.runs))]
    for name in columns:
        cell = group.cells.get(name)
        row.append(cell_text(cell, MEASURES[name]))
        if name == comparison.primary and len(comparison.groups) > 1:
            row.append(difference_text(cell, MEASURES[name]))
    return row


def as_csv(comparison: Comparison) -> str:
    """Write the rows of `Comparison.table` as RFC 4180 has it; what is not known is empty."""
    rows = comparison.table()
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(rows[0])
    writer.writerows([_csv_value(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _csv_value(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return repr(value) if isinstance(value, float) else text_of(value)


def as_markdown(comparison: Comparison) -> str:
    """Write a table in Markdown."""
    titles, rows = text_table(comparison, comparison.columns)
    alignment = ["---"] + ["---:"] * (len(titles) - 1)
    lines = ["| " + " | ".join(map(_markdown, line)) + " |" for line in (titles, *rows)]
    lines.insert(1, "| " + " | ".join(alignment) + " |")
    return "\n".join([*lines, "", _markdown(LEGEND)]) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>\[\]#~])", r"\\\1", " ".join(text.split()))


def as_latex(comparison: Comparison) -> str:
    r"""Write a table in LaTeX with \toprule, \midrule and \bottomrule of the package booktabs."""
    titles, rows = text_table(comparison, comparison.columns)
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (len(titles) - 1)}}}",
        "  \\toprule",
        f"  {_latex_row(titles)}",
        "  \\midrule",
        *(f"  {_latex_row(row)}" for row in rows),
        "  \\bottomrule",
        "\\end{tabular}",
        f"% {LEGEND}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    # a bracket at the start of a row would be the optional argument of the \\ before it
    return " & ".join(f"{{{latex(cell)}}}" if cell.startswith("[") else latex(cell) for cell in cells) + r" \\"


def latex(text: str) -> str:
    """Escape what has a meaning in LaTeX."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def as_html(comparison: Comparison) -> str:
    """Write a table in HTML, with all texts escaped, for notebooks."""
    titles, rows = text_table(comparison, comparison.columns)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    texts = [*comparison.notes, *(advice.text for advice in comparison.advice)]
    listed = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{html.escape(LEGEND)}</p>" + (
        f"<ul>{listed}</ul>" if listed else ""
    )


def as_json(comparison: Comparison) -> Mapping[str, Any]:
    """Return everything about a comparison as plain values."""
    return {
        "test_samples": comparison.num_samples,
        "by": list(comparison.keys),
        "columns": comparison.columns,
        "rows": comparison.table(),
        "notes": list(comparison.notes),
        "advice": [advice.to_dict() for advice in comparison.advice],
    }
