"""Small tables in HTML for notebooks; every text is escaped, because names of files and plugins can be anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ensemblekit.core.streams import printable


def html_text(text: object) -> str:
    """Escape a text for HTML, without control characters."""
    return escape(printable(str(text)))


def html_table(rows: Iterable[Sequence[object]], columns: Sequence[str] = (), caption: str = "") -> str:
    """Return a table whose first column has the names of the rows.

    Args:
        rows: the cells of each row.
        columns: the names of the columns; none: the table has no header.
        caption: stands above the table.
    """
    title = f"<caption>{html_text(caption)}</caption>" if caption else ""
    head = "".join(f'<th scope="col">{html_text(name)}</th>' for name in columns)
    head = f"<thead><tr>{head}</tr></thead>" if columns else ""
    body = "".join(_row(row) for row in rows)
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


def _row(row: Sequence[object]) -> str:
    name, *cells = map(html_text, row)
    texts = "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row" style="text-align: left">{name}</th>{texts}</tr>'
