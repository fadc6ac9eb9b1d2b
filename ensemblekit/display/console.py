"""Printing: tables on a terminal, plain aligned text on a pipe, JSON if requested."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ensemblekit.runs.sealing import finite


class Printer:
    """Prints to standard output; with colours and rulers only on a terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)  # rich itself respects NO_COLOR
        self.for_a_person = self.console.is_terminal

    def json(self, value: Any) -> None:
        """Print one JSON document, with null in place of nan and infinity."""
        print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.console.print(Text(text, style="bold"))

    def text(self, text: str = "") -> None:
        """Print a paragraph, wrapped on a terminal."""
        self.console.print(Text(text), soft_wrap=not self.for_a_person)

    def verbatim(self, text: str) -> None:
        """Print text that is meant to be copied: never wrapped, never styled."""
        print(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under column names; an empty table prints nothing."""
        if not rows:
            return
        if self.for_a_person:
            table = Table(box=SIMPLE_HEAD, pad_edge=False)
            for index, column in enumerate(columns):
                table.add_column(column, style="cyan" if index == 0 else "", overflow="fold", no_wrap=index == 0)
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            self.console.print(table)
            return
        lines = [columns, *([cell.replace("\n", "; ") for cell in row] for row in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
