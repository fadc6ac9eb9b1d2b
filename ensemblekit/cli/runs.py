"""The commands about runs: train, resume, evaluate, predict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ensemblekit.cli.completion import complete_dataset, complete_device, complete_directory
from ensemblekit.cli.options import (
    json_option,
    plugin_option,
    quiet_option,
    run_argument,
    set_option,
    spec_argument,
    writing_to,
)
from ensemblekit.core.errors import UsageError
from ensemblekit.training.interruption import stop_requests

if TYPE_CHECKING:
    from ensemblekit.runs.run import Run


@click.command()
@spec_argument
@set_option
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
    help="Directory of the run. Default: runs/NAME-N, from the name of the spec and the first free number.",
)
@click.option(
    "--device",
    shell_complete=complete_device,
    help="Device to train on: cpu, cuda, cuda:1, mps or auto. Short for --set engine.device=…",
)
@plugin_option
@quiet_option
@json_option
def train(
    spec_file: Path,
    settings: Sequence[str],
    out: Path | None,
    device: str | None,
    plugin_files: Sequence[str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Train the ensemble that a spec describes.

    SPEC is a TOML file, or the name of a shipped spec such as digits (ensemblekit specs lists them). Shows the plan,
    the progress and the result, and saves everything in a run directory.

    Ctrl-C saves and stops; ensemblekit resume goes on from the very step. A value of --set is read as
    TOML; anything that is not valid TOML is taken as a string.
    """
    with stop_requests():
        from ensemblekit import api
        from ensemblekit.display.progress import choose_progress
        from ensemblekit.spec.shipped import find_spec
        from ensemblekit.spec.tables import parse_override

        overrides = dict(parse_override(setting) for setting in settings)
        if device is not None:
            overrides["engine.device"] = device
        path = find_spec(spec_file)
        spec = api.load_spec(path, overrides, plugin_files)
        with closing(choose_progress(quiet or as_json)) as progress:
            run = api.train(spec, out, progress=progress, plugins=plugin_files, name=path.stem)
        _print_run(run, quiet, as_json)


@click.command()
@run_argument
@click.option(
    "--engine", metavar="NAME", help="Go on with another engine, or auto to measure again; the last bits will differ."
)
@click.option(
    "--device", shell_complete=complete_device, help="Go on on another device: cpu, cuda, cuda:1, mps or auto."
)
@click.option(
    "--epochs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Train the run, finished or not, to N epochs in all. The learning rate goes on as in a run of N epochs: "
    "constant, step and multistep schedules simply continue; cosine and cyclic ones take the value they have there.",
)
@plugin_option
@quiet_option
@json_option
def resume(
    run_path: Path,
    engine: str | None,
    device: str | None,
    epochs: int | None,
    plugin_files: Sequence[str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Continue an interrupted run from its last checkpoint.

    The result is bit-identical to that of an uninterrupted run, unless the engine, the device or the machine changes;
    a note says so then. With --epochs a finished run is trained further.
    """
    with stop_requests() as stop:
        stop.outcome = ("nothing was changed", str(run_path), "run the command again")
        from ensemblekit import api
        from ensemblekit.display.progress import choose_progress

        given = {"engine": engine, "device": device, "epochs": epochs}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with closing(choose_progress(quiet or as_json)) as progress:
            run = api.resume(run_path, progress=progress, plugins=plugin_files, **options)
        _print_run(run, quiet, as_json)


def _print_run(run: Run, quiet: bool, as_json: bool) -> None:
    """Print the final metrics or the path of a run, if its progress was not shown."""
    from ensemblekit.display.console import Printer

    if as_json:
        Printer().json({**run.metrics, "path": str(run.path)})
    elif quiet:
        Printer().verbatim(str(run.path))


@click.command()
@run_argument
@click.option(
    "--data",
    metavar="NAME|TABLE",
    shell_complete=complete_dataset,
    help="Use another data set with inputs and outputs of the same shape: its name, or a TOML table { name = … }.",
)
@plugin_option
@json_option
def evaluate(run_path: Path, data: str | None, plugin_files: Sequence[str], as_json: bool) -> None:
    """Show every metric of a run on its test data.

    Accuracy or error, calibration, the members and their diversity.
    """
    from ensemblekit import api
    from ensemblekit.display.console import Printer
    from ensemblekit.display.summary import decomposition_line, metric_rows

    other = None if data is None else _parse_data(data)
    metrics = api.evaluate_run(run_path, data=other, plugins=plugin_files)
    printer = Printer()
    if as_json:
        printer.json(metrics)
        return
    printer.table(("of", "metric", "value"), metric_rows(metrics))
    line = decomposition_line(metrics)
    if line:
        printer.text()
        printer.text(line)


def _parse_data(text: str) -> Any:
    """The value of --data, parsed as the values of --set are."""
    from ensemblekit.spec.tables import parse_override

    try:
        return parse_override(f"data={text}")[1]
    except UsageError as error:
        fix = 'write a name, or a table: {name="image_folder", path="…"}'
        raise UsageError(f'"{text}" is neither a name nor a TOML table', "--data", fix) from error


@click.command()
@run_argument
@click.argument("files", metavar="FILES…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["csv", "json"]),
    help="Default: by the extension of --output, else csv.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write to this file. Default: standard output."
)
@plugin_option
def predict(
    run_path: Path,
    files: Sequence[Path],
    file_format: Literal["csv", "json"] | None,
    as_json: bool,
    output: Path | None,
    plugin_files: Sequence[str],
) -> None:
    """Predict classes or values for new files, with uncertainty.

    FILES are images (PNG, JPEG, WebP, BMP) if the run was trained on images. Otherwise they are CSV files with a
    header: the columns of the training table, or the features in their order.

    For classes: probability, share of members that agree, predictive entropy and mutual information (the part of the
    entropy that is due to disagreement). For values: standard deviation over the members.
    """
    from ensemblekit import api
    from ensemblekit.inference.prediction import format_predictions, predict_files

    if file_format is None:
        file_format = "json" if as_json or (output and output.suffix.lower() == ".json") else "csv"
    text = format_predictions(predict_files(api.load(run_path, plugins=plugin_files), files), file_format)
    if output is None:
        click.echo(text, nl=False)
        return
    with writing_to(output):
        output.write_text(text, encoding="utf-8")


COMMANDS = {"Train": (train, resume), "Look at results": (evaluate,), "Use a trained ensemble": (predict,)}
