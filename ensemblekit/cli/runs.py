"""The commands about runs: train, resume, evaluate, predict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.completion import complete_dataset, complete_device, complete_directory
from ensemblekit.cli.options import (
    counting_progress,
    inference_device_option,
    json_option,
    plugin_option,
    quiet_option,
    run_argument,
    set_option,
    spec_argument,
)
from ensemblekit.cli.robustness import parse_data, print_robustness, robustness_options
from ensemblekit.core.errors import DataError, EnsemblekitError
from ensemblekit.ranks.launch import is_replacement, num_ranks
from ensemblekit.training.interruption import StopRequest, stop_requests

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
    supervise_rank(spec_file, settings)
    with stop_requests() as stop, ranks_of_torchrun(stop) as is_first:
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
            run = api.train(spec, out, progress=progress, plugins=plugin_files, name=_run_name(path))
        if is_first:
            _print_run(run, quiet, as_json)


def supervise_rank(spec_file: Path, settings: Sequence[str] = ()) -> None:
    """Go on in another process if torchrun has started several and engine.journal is set; this one replaces it."""
    if num_ranks() == 1:
        return
    from ensemblekit.ranks.supervisor import supervise, wants_journal
    from ensemblekit.spec.shipped import find_spec

    with suppress(EnsemblekitError):  # what is wrong with the spec is told by the process that reads it
        spec_file = find_spec(spec_file)
    if wants_journal(spec_file, settings):
        from ensemblekit import api  # noqa: F401  # once for all: a process that replaces another is ready at once

        supervise()


@contextmanager
def ranks_of_torchrun(stop: StopRequest) -> Iterator[bool]:
    """Join the other processes of torchrun before anything can fail; yields whether this is the first."""
    from ensemblekit.ranks.session import joined_ranks

    if is_replacement():
        stop.outcome = ("stopped: the last checkpoint is kept", "torchrun", "continue with: ensemblekit resume RUN")
    with joined_ranks() as group:
        yield group.is_first


def _run_name(spec_file: Path) -> str:
    """The name of a run of this spec: that of the file or, for the spec of another run, that of the other run."""
    directory = spec_file.absolute().parent
    if spec_file.name == "spec.toml" and (directory / "run.json").is_file():
        return re.sub(r"-\d+$", "", directory.name) or spec_file.stem
    return spec_file.stem


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
    supervise_rank(run_path / "spec.toml")
    with stop_requests() as stop, ranks_of_torchrun(stop) as is_first:
        stop.outcome = ("nothing was changed", str(run_path), "run the command again")
        from ensemblekit import api
        from ensemblekit.display.progress import choose_progress

        given = {"engine": engine, "device": device, "epochs": epochs}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with closing(choose_progress(quiet or as_json)) as progress, _training_files("put the file back at that path"):
            run = api.resume(run_path, progress=progress, plugins=plugin_files, **options)
        if is_first:
            _print_run(run, quiet, as_json)


@contextmanager
def _training_files(fix: str) -> Iterator[None]:
    """Say what to do about a file of a run's spec that is gone: a spec that was trained cannot be changed."""
    try:
        yield
    except DataError as error:
        if error.path is None or Path(error.path).exists():
            raise
        raise DataError(error.what, error.where, fix, path=error.path) from error


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
    metavar="NAME|TABLE|FILE",
    shell_complete=complete_dataset,
    help="Use other data with inputs and outputs of the same shape: the name of a data set, a TOML table { name = … }, "
    "or, for a run on a table, a file with the same columns.",
)
@click.option(
    "--ood",
    metavar="NAME|TABLE|PATH",
    shell_complete=complete_dataset,
    help="Show how well the uncertainty tells this data from the run's own test data: the name of a data set, a TOML "
    "table { name = … }, a folder of images, or a file that predict takes.",
)
@click.option(
    "--corrupt",
    metavar="[NAMES]",
    is_flag=False,
    flag_value="all",
    help="Show the metrics on corrupted test images: all corruptions, or those named, separated by commas: "
    "gaussian_noise, shot_noise, impulse_noise, gaussian_blur, brightness, contrast, pixelate, jpeg. Give RUN first.",
)
@click.option("--severities", metavar="LIST", help="Severities of --corrupt, for example 1,3,5. Default: 1,2,3,4,5.")
@inference_device_option
@click.option("--per-class", is_flag=True, help="Add the classes and their confusion matrix to --json.")
@click.option(
    "--combiner",
    metavar="NAME|TABLE",
    help="What if the members were combined by this combiner, for example: probabilities? Computed from the outputs "
    "that the run has kept, without a calibration of its own combination.",
)
@plugin_option
@json_option
def evaluate(
    run_path: Path,
    data: str | None,
    ood: str | None,
    corrupt: str | None,
    severities: str | None,
    device: str,
    per_class: bool,
    combiner: str | None,
    plugin_files: Sequence[str],
    as_json: bool,
) -> None:
    """Show every metric of a run on its test data.

    Accuracy or error, calibration, the members and their diversity; for classes also recall, precision and what each
    class is taken for. The first lines say how the members are combined and whether the run is calibrated; a run with
    prediction sets or intervals also has their coverage. --json prints the metrics as one flat object; a metric without
    a value is null.

    With --ood: AUROC, AUPR and false positive rate at 95 % true positives of each measure of uncertainty, where the
    samples of the other data are the positive ones. With --corrupt: accuracy, NLL and ECE by corruption and severity.

    \b
    ensemblekit evaluate runs/digits-1 --ood photos/
    ensemblekit evaluate runs/digits-1 --corrupt gaussian_noise,jpeg --severities 1,3,5
    """
    from ensemblekit import api
    from ensemblekit.display.console import Printer

    other = None if data is None else parse_data(data, "--data")
    options = robustness_options(ood, corrupt, severities)
    with (
        _training_files("put the file back at that path, or give it with --data FILE")
        if data is None and ood is None
        else nullcontext(),
        counting_progress("corruptions") if corrupt else nullcontext() as progress,
    ):
        if progress is not None:
            options["progress"] = progress
        if combiner is not None:
            options["combiner"] = parse_data(combiner, "--combiner", '{name="…"}')
        metrics = api.evaluate_run(run_path, data=other, plugins=plugin_files, device=device, per_class=True, **options)
    details: dict[str, Any] = {key: metrics.pop(key) for key in ("classes", "confusion", "set_sizes") if key in metrics}
    if as_json:
        flat = {name: value if isfinite(value) else None for name, value in metrics.items()}
        Printer().json({**flat, **_combination(metrics), **(details if per_class else {})})
    elif ood is not None or corrupt is not None:
        print_robustness(_evaluated(metrics, other), metrics, ood, corrupt is not None)
    else:
        _print_evaluation(_evaluated(metrics, other), metrics, details, run_path)


def _combination(metrics: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what the metrics are for, beside the run, unless the methods combine and nothing is calibrated."""
    from ensemblekit.inference.evaluation import Evaluation

    if not isinstance(metrics, Evaluation) or metrics.is_plain:
        return {}
    return {"combiner": metrics.combiner, "calibration": metrics.calibration}


def _evaluated(metrics: Mapping[str, Any], data: Any) -> str:
    """Say on how many samples of which data metrics were computed; `data` is the parsed value of --data."""
    from ensemblekit.core.registry import discover
    from ensemblekit.inference.evaluation import Evaluation

    if not isinstance(metrics, Evaluation):
        return ""
    count = f"{metrics.num_samples:,}"
    if isinstance(data, str) and Path(data).is_file() and data not in discover().plugins("dataset"):
        return f"{count} row{'s' * (metrics.num_samples != 1)} of {data}"
    name = data.get("name") if isinstance(data, Mapping) else data
    return f"{count} test sample{'s' * (metrics.num_samples != 1)} of {name or metrics.trained_on}"


def _combined(metrics: Mapping[str, Any]) -> str:
    """Say how members were combined and calibrated: `combiner mean, calibrated (temperature)`; empty if unknown."""
    from ensemblekit.inference.evaluation import Evaluation

    if not isinstance(metrics, Evaluation) or not metrics.combiner:
        return ""
    calibrated = "not calibrated" if metrics.calibration is None else f"calibrated ({metrics.calibration})"
    parts = [f"combiner {metrics.combiner}", *([calibrated] if "test_accuracy" in metrics else [])]
    if metrics.conformal is not None:
        parts.append(f"coverage of at least {1 - metrics.conformal.error:g} asked ({metrics.conformal.score})")
    return ", ".join(parts)


def _print_evaluation(evaluated: str, metrics: Mapping[str, float], details: Mapping[str, Any], run_path: Path) -> None:
    """Print which data was evaluated, its metrics, the decomposition of the loss, the classes, and what to do next."""
    from ensemblekit.display.confusion import print_classes, print_set_sizes
    from ensemblekit.display.console import Printer
    from ensemblekit.display.robustness import print_next_steps
    from ensemblekit.display.summary import decomposition_line, metric_rows

    printer = Printer()
    if evaluated:
        printer.text(evaluated)
        if combined := _combined(metrics):
            printer.text(combined)
        printer.text()
    printer.table(("of", "metric", "value"), metric_rows(metrics))
    if line := decomposition_line(metrics):
        printer.text()
        printer.text(line)
    if details:
        print_classes(printer, details["classes"], details.get("confusion", ()))
        print_set_sizes(printer, details.get("set_sizes", []))
    if evaluated:
        print_next_steps(printer, run_path, metrics)


COMMANDS = {"Train": (train, resume), "Look at results": (evaluate,)}
