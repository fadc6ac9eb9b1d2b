"""Printing: tables on a terminal, plain aligned text on a pipe, JSON if requested.

Every text is made printable here, so that no name or description can control the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ensemblekit.core.streams import DocumentOutput, StandardOutput, escape_json, printable
from ensemblekit.runs.sealing import finite


class Printer:
    """Prints to standard output; with colours and rulers only on a terminal.

    Args:
        optional: whether output may be lost, as that of a display: see `StandardOutput`.
    """

    def __init__(self, optional: bool = False) -> None:
        self.output = StandardOutput(optional)
        # rich itself respects NO_COLOR
        self.console = Console(file=cast("IO[str]", self.output), highlight=False)
        self.for_a_person = self.console.is_terminal

    def json(self, value: Any) -> None:
        """Print one JSON document, with null in place of nan and infinity."""
        ascii_only = not self.output.encoding.lower().startswith("utf")
        text = json.dumps(finite(value), indent=2, ensure_ascii=ascii_only, allow_nan=False)
        self.output.write(escape_json(text) + "\n")

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.console.print(Text(printable(text), style="bold"))

    def text(self, text: str = "") -> None:
        """Print a paragraph, wrapped on a terminal."""
        self.console.print(Text(printable(text)), soft_wrap=not self.for_a_person)

    def verbatim(self, text: str) -> None:
        """Print text that is meant to be copied: never wrapped, never styled."""
        self.output.write(printable(text, keep="\n\t") + "\n")

    def document(self, text: str) -> None:
        """Print the content of a file: exactly on a pipe, printable on a terminal."""
        DocumentOutput(self.output.optional).write(text)

    def panel(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print labelled texts in a frame, for a terminal."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for row in rows:
            grid.add_row(*map(_cell, row))
        self.console.print(Panel(grid, title=title, title_align="left", expand=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under column names; an empty table prints nothing."""
        if not rows:
            return
        if self.for_a_person:
            self.console.print(_rich_table(columns, rows))
            return
        lines = [[printable(cell.replace("\n", "; ")) for cell in line] for line in (columns, *rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
        padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        self.output.write("".join(f"{line.rstrip()}\n" for line in padded))

    def fits(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
        """Whether a table is shown without folding a cell; on a pipe it always is."""
        if not self.for_a_person:
            return True
        unlimited = self.console.options.update(width=10**6)
        return self.console.measure(_rich_table(columns, rows), options=unlimited).maximum <= self.console.width


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        style = "cyan" if index == 0 else ""
        table.add_column(_cell(column), style=style, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    return Text(printable(text, keep="\n"))
