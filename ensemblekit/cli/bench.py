"""The command bench: measures the speed of the engines on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from ensemblekit.cli.completion import complete_workload
from ensemblekit.cli.options import json_option, writing_to

if TYPE_CHECKING:
    from ensemblekit.bench.measurement import Result
    from ensemblekit.bench.progress import Report
    from ensemblekit.bench.workloads import Workload
    from ensemblekit.display.console import Printer

Measured = TypeVar("Measured")


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and smaller workloads, fewer rounds, no memory: under a minute.")
@click.option(
    "--only",
    "names",
    multiple=True,
    metavar="WORKLOAD",
    shell_complete=complete_workload,
    help="Measure only this workload. Repeatable.",
)
@click.option("--ranks", is_flag=True, help="Measure one process against 1 and 2 ranks, and what ranks exchange.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Also write the results as CSV.")
@json_option
def bench(quick: bool, names: Sequence[str], ranks: bool, output: Path | None, as_json: bool) -> None:
    """Measure every engine against a hand-written training loop.

    Also shows which engine `auto` would choose, and predictions by onnxruntime if the extra onnx is installed.
    Contestants take turns (A B A B …). The loop runs in a process of its own with the default malloc, because the
    command line changes malloc's settings for its whole process.

    The table shows the median time of a step and its spread (half the interquartile range), the speed-up over the
    loop, the growth of memory in a separate process, and the share of this machine's peak rate of arithmetic: that of
    a large matrix product or convolution in float32 on all cores, whichever is faster.

    Progress and an estimate of the remaining time are on standard error: a line that is renewed on a terminal, plain
    lines elsewhere.

    \b
    Workloads: tiny-16, tiny-64, tiny-uncoupled, small-convolutions, small-weighted, real-convolutions,
    real-uncoupled, snapshot-16, boosting-8, data-pipeline, inference-16, binary-8, mobilenet-8.
    All of them take some minutes.

    With --ranks, the threaded engine in one process takes turns with 1 and 2 ranks, on three of the workloads. The
    table shows the speed relative to one process, the share of time in exchanges (waiting for the slower rank
    included), and the bytes that a rank sends per step, beside those of an all-reduce of the gradients.
    """
    from ensemblekit.runs.atomic import replace_file

    if output is not None:
        _check_writable(output)  # before the measurements, so that a wrong path does not cost them
    options = [*["--ranks"] * ranks, *["--quick"] * quick, *(part for name in names for part in ("--only", name))]
    measure = _measure_ranks if ranks else _measure_engines
    csv_file = measure(quick, names, as_json, " ".join(["ensemblekit bench", *options]))
    if output is not None:
        replace_file(output, csv_file.encode())


def _measure_engines(quick: bool, names: Sequence[str], as_json: bool, command: str) -> str:
    """Measure the engines and print the results; returns them as CSV."""
    from ensemblekit.bench import measurement
    from ensemblekit.bench.report import as_json as results_as_json
    from ensemblekit.bench.report import print_result, results_as_csv
    from ensemblekit.bench.workloads import select_workloads
    from ensemblekit.display.console import Printer
    from ensemblekit.training.environment import choose_device

    workloads, device = select_workloads(names, quick), choose_device("auto")

    def measure(workload: Workload, report: Report) -> Result:
        return measurement.measure(workload, device, not quick, report)

    results = _measured(workloads, measure, None if as_json else print_result)
    if as_json:
        Printer().json(results_as_json(results))
    return results_as_csv(results, command)


def _measure_ranks(quick: bool, names: Sequence[str], as_json: bool, command: str) -> str:
    """Measure steps on ranks and print the results; returns them as CSV."""
    from ensemblekit.bench import ranks
    from ensemblekit.bench.rank_report import print_rank_result, rank_results_as_csv, rank_results_as_json
    from ensemblekit.display.console import Printer

    workloads = ranks.rank_workloads(names, quick)
    results = _measured(workloads, ranks.measure_ranks, None if as_json else print_rank_result)
    if as_json:
        Printer().json(rank_results_as_json(results))
    return rank_results_as_csv(results, command)


def _measured(
    workloads: Sequence[Workload],
    measure: Callable[[Workload, Report], Measured],
    print_result: Callable[[Measured, Printer], None] | None,
) -> list[Measured]:
    """Measure workloads and show the progress; each result is printed when it is there, if there is a way to."""
    from ensemblekit.bench.progress import bench_progress
    from ensemblekit.bench.report import print_title
    from ensemblekit.display.console import Printer

    printer = Printer()
    results: list[Measured] = []
    with closing(bench_progress(workloads)) as progress:
        for workload in workloads:
            if print_result is not None:
                print_title(workload, printer)
            progress.workload_started()
            results.append(measure(workload, progress.step))
            progress.workload_finished()
            if print_result is not None:
                print_result(results[-1], printer)
    return results


def _check_writable(output: Path) -> None:
    """Try to write a file; an existing one keeps its content."""
    existed = output.exists()
    with writing_to(output):
        output.open("a").close()
        if not existed:
            output.unlink()


COMMANDS = {"Speed": (bench,)}
