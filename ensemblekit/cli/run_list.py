"""The command that lists runs."""

from __future__ import annotations

from pathlib import Path

import click

from ensemblekit.cli.completion import complete_directory
from ensemblekit.cli.options import json_option
from ensemblekit.core.errors import UsageError


@click.command("runs")
@click.argument(
    "directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path), shell_complete=complete_directory
)
@click.option(
    "--sort",
    metavar="KEY",
    default="started",
    show_default=True,
    help="Sort by name, status, epoch, method, model, members, data, accuracy, mse, loss, diversity, started or "
    "seconds; -accuracy puts the largest first.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print a CSV table.")
def list_runs(directory: Path | None, sort: str, reverse: bool, as_json: bool, as_csv: bool) -> None:
    """List the runs below a directory, with their status and result.

    DIR is searched with everything below it, sweeps included. Default: runs/. Damaged runs are listed with the reason.
    No plugin is imported, and nothing is changed.
    """
    from ensemblekit.analysis.run_list import DEFAULT_DIRECTORY, ListedRun
    from ensemblekit.analysis.run_list import list_runs as find
    from ensemblekit.display.console import Printer
    from ensemblekit.display.run_table import run_table
    from ensemblekit.display.tables import csv_text

    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other", "ensemblekit runs", "give one of them")
    printer = Printer()
    place = directory or DEFAULT_DIRECTORY
    has_none = directory is None and not place.exists()
    runs = [] if has_none else find(place, sort, reverse)
    if as_json:
        printer.json([run.to_dict() for run in runs])
    elif as_csv:
        names = list(ListedRun.__dataclass_fields__)
        printer.document(csv_text(names, [[run.to_dict()[name] for name in names] for run in runs]))
    elif runs:
        printer.table(*run_table(runs))
    else:
        printer.text(f"no runs in {place}; start one with: ensemblekit train digits")


COMMANDS = {"Look at results": (list_runs,)}
