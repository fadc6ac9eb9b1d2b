"""The command select: the best members of one run or of several become a run of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.completion import complete_directory
from ensemblekit.cli.options import json_option, plugin_option
from ensemblekit.core.errors import UsageError

if TYPE_CHECKING:
    from ensemblekit.inference.selecting import Selection
    from ensemblekit.inference.selection import Search

MAX_NAMED = 12
"""Members that are named in a row of the curve; of more, only the number is given."""


@click.command()
@click.argument(
    "paths",
    metavar="RUN…",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
)
@click.option(
    "--members",
    metavar="K",
    type=click.IntRange(min=1),
    help="Members to choose; with --budget or --replace, at most K. Default: as many as have the lowest validation "
    "loss.",
)
@click.option("--pool", is_flag=True, help="Choose from the members of several runs on the same data.")
@click.option(
    "--replace",
    is_flag=True,
    help="Pick members also more than once; the share of its picks becomes the weight of a member.",
)
@click.option(
    "--budget",
    metavar="AMOUNT",
    help="Most that the members may cost together: 50000parameters, or 5ms of time for 1,000 predictions, measured "
    "here on the CPU.",
)
@click.option(
    "--search",
    type=click.Choice(["auto", "greedy", "exhaustive"]),
    default="auto",
    show_default=True,
    help="How to search; auto tries all sets of members if there are at most 4,096 and the validation data is small.",
)
@click.option(
    "--combiner",
    metavar="NAME",
    help="Combiner that members are chosen for, and that the new run has. Default: that of the runs.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
    help="Directory of the new run. Default: runs/selected-N with the first free number.",
)
@json_option
@plugin_option
def select(
    paths: Sequence[Path],
    members: int | None,
    pool: bool,
    replace: bool,
    budget: str | None,
    search: Search,
    combiner: str | None,
    out: Path | None,
    as_json: bool,
    plugin_files: Sequence[str],
) -> None:
    """Choose the best members of one run, or of several, as a new run.

    Members are chosen by the loss of their combined output on validation data: greedily (Caruana et al. 2004), or by
    trying all sets of members if there are few. Shows the validation loss for each number of members, then the new run
    and its metrics on test data, which have no part in the choice. No network is trained.

    \b
    ensemblekit select runs/digits-1 --members 4
    ensemblekit select runs/digits-1 runs/digits-2 --pool --members 4 --out runs/small
    ensemblekit select runs/digits-1 --budget 50000parameters
    """
    if len(paths) > 1 and not pool:
        fix = "add --pool to choose from the members of all, or select from each by itself"
        raise UsageError(f"{len(paths)} runs were given", "select", fix)
    from ensemblekit import after_training
    from ensemblekit.display.console import Printer

    selection = after_training.select(
        paths,
        members=members,
        out=out,
        replace=replace,
        budget=budget,
        search=search,
        combiner=combiner,
        plugins=plugin_files,
    )
    if as_json:
        Printer().json(selection.to_dict())
    else:
        _print(selection)


def _print(selection: Selection) -> None:
    from ensemblekit.display.console import Printer

    printer = Printer()
    printer.text(f"search: {selection.search}; combiner: {selection.combiner}; validation data:")
    rows = [*selection.curve, selection.all_members]
    keys = [key for key in rows[0] if key not in ("chosen", "is_selected")]
    names = [key.removeprefix("validation_") for key in keys]
    printer.table(("", *names, "chosen"), [_cells(row, keys) for row in rows])
    printer.text()
    for member in selection.chosen:
        weight = f", picked {member['count']} times" if member["count"] > 1 else ""
        printer.text(f"member {member['member']} of {member['run']}{weight}")
    metrics = selection.run.metrics
    shown = [name for name in ("test_accuracy", "test_mse", "test_loss") if name in metrics]
    printer.text(f"test data: {', '.join(f'{name} {metrics[name]:.4g}' for name in shown)}")
    printer.text(f"run: {selection.path}")


def _cells(row: dict[str, Any], keys: Sequence[str]) -> list[str]:
    chosen = row["chosen"]
    named = " ".join(chosen) if len(chosen) <= MAX_NAMED else f"{len(chosen)} members"
    values = [row.get(key) for key in keys]
    return ["→" if row["is_selected"] else "", *map(_number, values), named]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if value < 100 else f"{value:,.0f}"


COMMANDS = {"Use a trained ensemble": (select,)}
