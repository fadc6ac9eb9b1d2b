"""The command compare: runs and sweeps in one table, with intervals, a figure and advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ensemblekit.cli.completion import complete_directory
from ensemblekit.cli.options import counting_progress, json_option, plugin_option, writing_to
from ensemblekit.core.errors import UsageError

if TYPE_CHECKING:
    from ensemblekit.analysis.budget import Choice
    from ensemblekit.analysis.comparison import Comparison


@click.command()
@click.argument(
    "paths",
    metavar="RUN|SWEEP…",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
)
@click.option(
    "--by",
    multiple=True,
    metavar="KEY",
    help="Group runs by this key of their specs, for example method.lambda, and average over the others. Repeatable. "
    "Default: every key that differs, except the seed and where a run was computed.",
)
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the figure to a .png, .svg or .pdf file: a column for each base model.",
)
@click.option("--x", metavar="KEY", help="Key on the x axis of the figure. Default: method.lambda.")
@click.option(
    "--rows",
    metavar="NAME,…",
    help="Measures in the figure. Default: ensemble accuracy (or MSE), diversity, mean member, training loss.",
)
@click.option(
    "--at-most",
    "limits",
    multiple=True,
    metavar="MEASURE=VALUE",
    help="Also choose the group with the best validation accuracy (or MSE) among those within this limit, for example "
    "training_seconds=20, milliseconds_per_1000=50 or parameters=1e5, and print the commands that train, calibrate and "
    "export it. Repeatable.",
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with a column for each number.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a table in Markdown.")
@click.option("--latex", "as_latex", is_flag=True, help="Print a table in LaTeX, with booktabs.")
@plugin_option
def compare(
    paths: Sequence[Path],
    by: Sequence[str],
    plot: Path | None,
    x: str | None,
    rows: str | None,
    limits: Sequence[str],
    as_json: bool,
    as_csv: bool,
    as_markdown: bool,
    as_latex: bool,
    plugin_files: Sequence[str],
) -> None:
    """Compare runs and sweeps in one table, with a figure and advice.

    A row for each group of runs that differ only by their seed: mean ± standard deviation. The best value of a column
    has a star only if the 95 % interval of its difference from every other row excludes 0 (paired bootstrap over test
    samples; with several seeds Student's t adds their noise); rows not distinguishable from the best have the sign ≈.

    No network is run: the numbers come from the outputs that the runs have kept. Runs that are damaged or have not
    finished are named and left out.

    \b
    ensemblekit compare runs/digits-1 runs/digits-2
    ensemblekit compare sweeps/digits-1 --plot figure.svg
    ensemblekit compare sweeps/digits-1 --by method.lambda --latex
    ensemblekit compare sweeps/digits-1 --at-most training_seconds=20 --at-most milliseconds_per_1000=50
    """
    forms = {"--json": as_json, "--csv": as_csv, "--markdown": as_markdown, "--latex": as_latex}
    chosen = [name for name, is_chosen in forms.items() if is_chosen]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other", "compare", "choose one form of output")
    if plot is None and (x is not None or rows is not None):
        raise UsageError("--x and --rows are about the figure", "compare", "add --plot FILE")
    if limits and any((as_csv, as_markdown, as_latex)):
        raise UsageError("--at-most does not fit into a table", chosen[0], "leave one of both out, or take --json")
    at_most = dict(_limit(text) for text in limits)
    from ensemblekit import api
    from ensemblekit.analysis.figure_files import check_figure_file

    if plot is not None:
        check_figure_file(plot)
    with counting_progress("reading runs") as progress:
        comparison = api.compare(paths, by=by, plugins=plugin_files, progress=progress)
    if plot is not None:
        names = None if rows is None else [name.strip() for name in rows.split(",") if name.strip()]
        with writing_to(plot):
            comparison.plot(plot, x=x, rows=names)
    choice = comparison.best_within(at_most) if at_most else None
    _print(comparison, chosen[0] if chosen else "", plot, choice)


def _limit(text: str) -> tuple[str, float]:
    """Read MEASURE=VALUE."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        fix = "for example --at-most training_seconds=20"
        raise UsageError(f'expected MEASURE=VALUE with a number, got "{text}"', "--at-most", fix) from None


def _print(comparison: Comparison, form: str, plot: Path | None, choice: Choice | None) -> None:
    from ensemblekit.analysis import table_formats
    from ensemblekit.display.comparison import print_choice, print_comparison
    from ensemblekit.display.console import Printer

    printer = Printer()
    writers: dict[str, Callable[[Comparison], str]] = {
        "--csv": table_formats.as_csv,
        "--markdown": table_formats.as_markdown,
        "--latex": table_formats.as_latex,
    }
    if form == "--json":
        printer.json({**table_formats.as_json(comparison), **({"choice": choice.to_dict()} if choice else {})})
    elif form:
        printer.document(writers[form](comparison))
        for note in comparison.notes:
            click.echo(f"note: {note}", err=True)
    else:
        print_comparison(comparison, printer)
        if plot is not None:
            printer.text(f"figure: {plot}")
        if choice is not None:
            print_choice(choice, printer)


COMMANDS = {"Look at results": (compare,)}
