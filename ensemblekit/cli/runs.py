"""The commands about runs: train, resume, evaluate, predict. Like all of the command line they import late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ensemblekit.cli.options import json_option, plugin_option, quiet_option, set_option
from ensemblekit.core.errors import UsageError

if TYPE_CHECKING:
    from ensemblekit.display.progress import Progress

run_argument = click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))


@click.command()
@click.argument("spec_file", metavar="SPEC", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the run goes. Default: runs/NAME-NUMBER, by the name of the spec and the first free number.",
)
@click.option("--device", help="Where to compute: cpu, cuda, cuda:1, mps or auto. Short for --set engine.device=…")
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
    """Train the ensemble of a spec: show the plan, the progress and what came of it, and keep it in a directory.

    Ctrl-C saves and stops; `ensemblekit resume` goes on from there. A value of --set is read as TOML; what is no
    TOML value (a bare word, a path) is a string.
    """
    from ensemblekit import api
    from ensemblekit.spec.tables import parse_override
    from ensemblekit.training.runs import free_directory

    overrides = dict(parse_override(setting) for setting in settings)
    if device is not None:
        overrides["engine.device"] = device
    spec = api.load_spec(spec_file, overrides, plugin_files)
    place = out or free_directory(spec_file.stem)
    _run(lambda progress: api.train(spec, place, progress=progress, plugins=plugin_files), quiet, as_json)


@click.command()
@run_argument
@plugin_option
@quiet_option
@json_option
def resume(run_path: Path, plugin_files: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Go on with a run that was interrupted, from its last checkpoint, to the same result as without the break."""
    from ensemblekit import api

    _run(lambda progress: api.resume(run_path, progress=progress, plugins=plugin_files), quiet, as_json)


@click.command()
@run_argument
@click.option(
    "--data", metavar="NAME-OR-TABLE", help="Another data set of the same form: its name, or a TOML table { name = … }."
)
@plugin_option
@json_option
def evaluate(run_path: Path, data: str | None, plugin_files: Sequence[str], as_json: bool) -> None:
    """Show every metric of a run's ensemble on its test data: accuracy, calibration, members, diversity."""
    from ensemblekit import api
    from ensemblekit.display.console import Printer
    from ensemblekit.display.summary import decomposition_line, metric_rows

    other = None if data is None else _data_table(data)
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


def _data_table(text: str) -> Any:
    """What --data says, read as --set reads it."""
    from ensemblekit.spec.tables import parse_override

    try:
        return parse_override(f"data={text}")[1]
    except UsageError as error:
        fix = 'write a name, or a table: {name="image_folder", path="…"}'
        raise UsageError(error.what.replace(f"data={text}", text), "--data", fix) from error


@click.command()
@run_argument
@click.argument("files", metavar="FILES…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "file_format", type=click.Choice(["csv", "json"]), help="Default: csv, or as FILE is called.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Write there, not to the terminal.")
@plugin_option
def predict(
    run_path: Path,
    files: Sequence[Path],
    file_format: Literal["csv", "json"] | None,
    as_json: bool,
    output: Path | None,
    plugin_files: Sequence[str],
) -> None:
    """Predict classes or values for new files, and say how sure the ensemble is.

    FILES are images (PNG, JPEG, WebP, BMP) if the run was trained on images. Else they are CSV files with a header:
    with the columns of your own table, which is read again to prepare them alike, or with the features in their order.

    Of classes: probability, the share of members that agree, the predictive entropy, and the mutual information
    (the part of the entropy that comes from disagreement). Of values: the standard deviation over the members.
    """
    from ensemblekit import api
    from ensemblekit.inference.prediction import format_predictions, predict_files

    if file_format is None:
        file_format = "json" if as_json or (output and output.suffix.lower() == ".json") else "csv"
    text = format_predictions(predict_files(api.load(run_path, plugins=plugin_files), files), file_format)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise UsageError(what, str(output), "name a file in a directory that you may write to") from error


def _run(work: Callable[[Progress], Any], quiet: bool, as_json: bool) -> None:
    """Train with progress, or print only the final metrics or the place of the run."""
    from ensemblekit.display.console import Printer
    from ensemblekit.display.progress import choose_progress

    progress = choose_progress(quiet or as_json)
    try:
        run = work(progress)
    finally:
        progress.close()
    if as_json:
        Printer().json({**run.metrics, "path": str(run.path)})
    elif quiet:
        Printer().verbatim(str(run.path))


COMMANDS = (train, resume, evaluate, predict)
