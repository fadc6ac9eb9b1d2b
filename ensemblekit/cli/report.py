"""The command report: one HTML page about a run or a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ensemblekit.cli.completion import complete_directory
from ensemblekit.cli.options import counting_progress, json_option, plugin_option


@click.command()
@click.argument("path", metavar="RUN|SWEEP", type=click.Path(path_type=Path), shell_complete=complete_directory)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write to this file, which appears or is replaced once it is complete. Default: report.html in the directory.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
@plugin_option
@json_option
def report(path: Path, output: Path | None, open_page: bool, plugin_files: Sequence[str], as_json: bool) -> None:
    """Write one HTML page about a run or a sweep.

    It shows the result, the learning curves, the members against the ensemble, the decomposition of the loss,
    calibration, how many members are worth it, classes, samples worth a look, time, environment and the command to
    repeat the run. Everything is computed from what the run has recorded and kept; no network is run.
    """
    from ensemblekit import api
    from ensemblekit.display.console import Printer

    with counting_progress("reading runs") as progress:
        written = api.write_report(path, output, plugin_files, progress=progress)
    printer = Printer()
    if as_json:
        printer.json({**asdict(written), "path": str(written.path)})
    else:
        for notice in written.notices:
            printer.text(f"note: {notice}")
        printer.text(written.sentence)
        printer.verbatim(f"{written.path}  ({written.num_bytes / 1000:,.0f} kB, {len(written.charts)} figures)")
    if open_page:
        click.launch(written.path.resolve().as_uri())


COMMANDS = {"Look at results": (report,)}
