"""The command bench: how fast the engines are here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ensemblekit.cli.options import json_option
from ensemblekit.core.errors import UsageError

if TYPE_CHECKING:
    from ensemblekit.bench.measurement import Result
    from ensemblekit.display.console import Printer


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and smaller workloads, fewer rounds, no memory: within a minute.")
@click.option("--only", "names", multiple=True, metavar="WORKLOAD", help="Measure this one alone. Repeatable.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write a CSV file with all that was measured.",
)
@json_option
def bench(quick: bool, names: Sequence[str], output: Path | None, as_json: bool) -> None:
    """Measure every engine that can run here against a loop written by hand, and say what `auto` would choose.

    Contestants take turns (A B A B …); the loop takes its own in another process, since malloc is set for a whole
    process and the loop has the default. The table shows the median time of a step and its spread (half the
    interquartile range), how many times as long the loop took, the memory that a process of its own grows by, and
    how much of the measured peak rate of matrix products (1024², float32, all cores) is reached.

    \b
    Workloads: tiny-16, tiny-64, tiny-uncoupled, small-convolutions, small-weighted, real-convolutions,
    real-uncoupled, snapshot-16, boosting-8, data-pipeline, inference-16. All of them take some minutes.
    """
    from ensemblekit.bench.measurement import measure
    from ensemblekit.bench.report import CSV_COLUMNS, csv_rows, csv_text
    from ensemblekit.bench.report import as_json as results_as_json
    from ensemblekit.bench.workloads import select_workloads
    from ensemblekit.display.console import Printer
    from ensemblekit.runs.atomic import replace_file
    from ensemblekit.training.runs import choose_device

    workloads = select_workloads(names, quick)
    if output is not None:
        _refuse_if_not_writable(output)  # before the work, so that a wrong place does not cost it
    device = choose_device("auto")
    printer = Printer()
    results = []
    for workload in workloads:
        result = measure(workload, device, with_memory=not quick)
        results.append(result)
        if not as_json:
            _show(result, printer)
    if as_json:
        printer.json(results_as_json(results))
    if output is not None:
        options = [*["--quick"] * quick, *(part for name in names for part in ("--only", name))]
        command = " ".join(["ensemblekit bench", *options])
        rows = [row for result in results for row in csv_rows(result, command)]
        replace_file(output, csv_text(CSV_COLUMNS, rows).encode())


def _show(result: Result, printer: Printer) -> None:
    from ensemblekit.bench.report import TABLE_COLUMNS, remarks, table_rows

    workload = result.workload
    printer.heading(workload.name)
    printer.text(f"{workload.title}; batches of {workload.batch_size}")
    columns = [column for column in zip(TABLE_COLUMNS, *table_rows(result), strict=True) if any(column[1:])]
    names, *rows = zip(*columns, strict=True)
    printer.table(names, rows)
    for line in remarks(result):
        printer.text(line)
    printer.text()


def _refuse_if_not_writable(output: Path) -> None:
    existed = output.exists()
    try:
        output.open("a").close()  # what is there stays, whatever happens on the way to something new
        if not existed:
            output.unlink()
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise UsageError(what, str(output), "name a file in a directory that you may write to") from error
