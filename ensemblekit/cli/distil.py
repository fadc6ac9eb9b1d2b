"""The command distil: one network that learns what an ensemble predicts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.completion import complete_directory
from ensemblekit.cli.options import json_option, plugin_option, quiet_option, run_argument, set_option
from ensemblekit.core.errors import UsageError
from ensemblekit.training.interruption import stop_requests

if TYPE_CHECKING:
    from ensemblekit.inference.students import DistilledRun


@click.command()
@run_argument
@click.option(
    "--model",
    metavar="NAME|TABLE",
    required=True,
    help='The network: the name of a model, or a TOML table: {name="mlp", hidden=[64, 64]}.',
)
@click.option(
    "--temperature",
    metavar="T",
    type=click.FloatRange(min=0, min_open=True),
    help="Temperature of both distributions. Default: 2.",
)
@click.option(
    "--labels-share",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    help="Weight of the true labels beside the ensemble's distribution. Default: 0.1.",
)
@click.option("--epochs", metavar="N", type=click.IntRange(min=1), help="Epochs. Default: those of RUN.")
@click.option(
    "--uncertainty",
    is_flag=True,
    help="Learn also how the members disagree: the network gets one output layer for each of them.",
)
@click.option("--baseline", is_flag=True, help="Also train the same network on the labels alone, in DIR-baseline.")
@set_option
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
    help="Directory of the new run. Default: runs/RUN-student-N with the first free number.",
)
@plugin_option
@quiet_option
@json_option
def distil(
    run_path: Path,
    model: str,
    temperature: float | None,
    labels_share: float | None,
    epochs: int | None,
    uncertainty: bool,
    baseline: bool,
    settings: Sequence[str],
    out: Path | None,
    plugin_files: Sequence[str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Train one network to predict what an ensemble predicts.

    It is trained as an ordinary run, with the data, loss, optimizer and epochs of RUN unless --set changes them, and
    needs the ensemble no more once it has finished. At the end it is compared with the ensemble on the test data, and
    predictions of both are timed in turn. --json prints the metrics and the comparison as one flat object.
    """
    with stop_requests():
        from ensemblekit import after_training
        from ensemblekit.display.progress import choose_progress
        from ensemblekit.spec.tables import parse_override

        overrides = dict(parse_override(setting) for setting in settings)
        with closing(choose_progress(quiet or as_json)) as progress:
            run = after_training.distil(
                run_path,
                _parse_model(model),
                out,
                temperature,
                labels_share,
                epochs,
                uncertainty=uncertainty,
                baseline=baseline,
                overrides=overrides,
                progress=progress,
                plugins=plugin_files,
            )
        _print(run, quiet, as_json)


def _parse_model(text: str) -> Any:
    """The value of --model, parsed as the values of --set are."""
    from ensemblekit.spec.tables import parse_override

    try:
        return parse_override(f"model={text}")[1]
    except UsageError as error:
        fix = 'write a name, or a table: {name="mlp", hidden=[64]}'
        raise UsageError(f'"{text}" is neither a name nor a TOML table', "--model", fix) from error


def _print(run: DistilledRun, quiet: bool, as_json: bool) -> None:
    from ensemblekit.display.console import Printer

    printer, figures = Printer(), run.comparison
    if as_json:
        paths = {"path": str(run.path)} | ({} if run.baseline is None else {"baseline_path": str(run.baseline.path)})
        printer.json({**run.metrics, **figures, **paths})
        return
    if quiet:
        printer.verbatim(str(run.path))
        return
    columns, *rows = run.rows()
    printer.text()
    printer.table(columns, rows)
    printer.text(f"a prediction takes {figures['time_ratio']:.2g} × the time of the ensemble's")
    for name in ("mutual_information", "standard_deviation"):
        if (correlation := figures.get(f"{name}_correlation")) is not None:
            printer.text(f"correlation of the {name.replace('_', ' ')} with the ensemble's: {correlation:.2f}")


COMMANDS = {"Use a trained ensemble": (distil,)}
