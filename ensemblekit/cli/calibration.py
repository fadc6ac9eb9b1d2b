"""The commands calibrate and conform: probabilities to act on, and prediction sets or intervals with a guarantee."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ensemblekit.cli.options import json_option, plugin_option, run_argument
from ensemblekit.core.errors import UsageError

if TYPE_CHECKING:
    from ensemblekit.inference.calibrating import CalibrationResult
    from ensemblekit.inference.conforming import ConformalResult
    from ensemblekit.inference.reliability import ReliabilityBin

SCORE_NAMES = {"nll": "NLL", "ece": "ECE", "adaptive_ece": "ECE, bins of equal mass", "brier": "Brier score"}


@click.command()
@run_argument
@click.option(
    "--with",
    "method",
    type=click.Choice(["temperature", "vector", "isotonic", "beta"]),
    default="temperature",
    show_default=True,
    help="temperature: one number, never changes a prediction. vector: a factor and a shift for each class. "
    "isotonic and beta: a function of each class's probability; isotonic needs a lot of validation data.",
)
@click.option("--members", is_flag=True, help="Fit a temperature to each member instead of one to the ensemble.")
@click.option("--undo", is_flag=True, help="Remove the calibration of the run.")
@plugin_option
@json_option
def calibrate(
    run_path: Path, method: str, members: bool, undo: bool, plugin_files: Sequence[str], as_json: bool
) -> None:
    """Calibrate the class probabilities of a run.

    Fits a map of the probabilities to the validation outputs that the run has kept, after its combiner, and keeps it in
    the run: predict, evaluate, compare, report and Python use it from then on. No network is run.

    What it is worth is measured by cross-fitting: samples are calibrated by a fit to the other folds of the validation
    data. Test data is never used.

    \b
    ensemblekit calibrate runs/digits-1
    ensemblekit calibrate runs/digits-1 --with isotonic
    ensemblekit calibrate runs/digits-1 --undo
    """
    from ensemblekit import after_training
    from ensemblekit.display.console import Printer

    if undo:
        if members:
            raise UsageError("--undo removes any calibration", "--members", "leave one of both out")
        removed = after_training.undo_calibrate(run_path, plugins=plugin_files)
        _print_removed(run_path, removed, "calibration", as_json)
        return
    result = after_training.calibrate(run_path, method, members, plugins=plugin_files)
    if as_json:
        Printer().json(result.to_dict())
    else:
        _print_calibration(result)
    _print_notices(result.notices, as_json)


def _print_calibration(result: CalibrationResult) -> None:
    from ensemblekit.display.console import Printer
    from ensemblekit.display.numbers import number, quality_text

    printer = Printer()
    printer.text(
        f"{result.calibration.description} for the combiner {result.combiner}, "
        f"fitted to {result.num_samples:,} validation samples"
    )
    printer.text()
    rows = [(title, number(result.before[name]), number(result.after[name])) for name, title in SCORE_NAMES.items()]
    accuracy = [quality_text(scores["accuracy"], "accuracy") for scores in (result.before, result.after)]
    printer.table(("on validation data, cross-fitted", "before", "after"), [*rows, ("accuracy", *accuracy)])
    printer.text()
    columns = ("confidence", "samples", "is right", "samples after", "is right after")
    printer.table(columns, list(_reliability_rows(result.reliability_before, result.reliability_after)))
    printer.text()
    printer.text(f"kept in {result.path}; ensemblekit calibrate {result.path} --undo removes it")


def _reliability_rows(before: Iterable[ReliabilityBin], after: Iterable[ReliabilityBin]) -> Iterable[tuple[str, ...]]:
    """Yield a row for each bin of confidence that has samples before or after."""
    for old, new in zip(before, after, strict=True):
        if old.count or new.count:
            shares = [f"{100 * each.accuracy:.1f} %" if each.accuracy is not None else "" for each in (old, new)]
            confidence = f"{100 * old.low:.0f} to {100 * old.high:.0f} %"
            yield confidence, f"{old.count:,}", shares[0], f"{new.count:,}", shares[1]


@click.command()
@run_argument
@click.option(
    "--error",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.1,
    show_default=True,
    help="Probability that a set or an interval misses the truth, at most.",
)
@click.option(
    "--score",
    type=click.Choice(["lac", "aps", "raps", "absolute", "normalised"]),
    help="For classes: lac (the smallest sets; default), aps or raps (larger sets for harder samples). For values: "
    "absolute (intervals of one width; default) or normalised (wider where the members disagree).",
)
@click.option("--undo", is_flag=True, help="Remove the prediction sets or intervals of the run.")
@plugin_option
@json_option
def conform(
    run_path: Path, error: float, score: str | None, undo: bool, plugin_files: Sequence[str], as_json: bool
) -> None:
    """Add prediction sets or intervals with a guarantee.

    Split conformal prediction: a threshold is fitted to the validation outputs that the run has kept, so that the sets
    of classes, or the intervals of values, of new samples hold the truth with probability 1 - error. The guarantee is
    for samples like the validation data, over the choice of both. A calibration of the run is applied first.

    predict then prints the sets (column set) or intervals (columns low and high); evaluate reports their coverage.

    \b
    ensemblekit conform runs/digits-1 --error 0.05
    ensemblekit conform runs/digits-1 --undo
    """
    from ensemblekit import after_training
    from ensemblekit.display.console import Printer

    if undo:
        removed = after_training.undo_conform(run_path, plugins=plugin_files)
        _print_removed(run_path, removed, "prediction sets or intervals", as_json)
        return
    result = after_training.conform(run_path, error, score, plugins=plugin_files)
    if as_json:
        Printer().json(result.to_dict())
    else:
        _print_conformal(result)
    _print_notices(result.notices, as_json)


def _print_conformal(result: ConformalResult) -> None:
    from ensemblekit.display.console import Printer
    from ensemblekit.display.numbers import number

    printer, conformal = Printer(), result.conformal
    what = "prediction sets" if conformal.is_for_classes else "prediction intervals"
    size = "classes in a set, on average" if conformal.is_for_classes else "mean width of an interval"
    printer.text(
        f"{what} with an error of at most {conformal.error:g} for the combiner {result.combiner}, "
        f"fitted to {conformal.num_samples:,} validation samples"
    )
    printer.text()
    thresholds = ", ".join(number(value) for value in conformal.thresholds)
    coverage = f"{100 * result.expected_coverage:.1f} % ± {100 * result.coverage_deviation:.1f}"
    rows = [
        ("score", conformal.score),
        ("threshold", thresholds),
        ("coverage to expect on new data", coverage),
        (f"{size}, on validation data", number(result.mean_size)),
    ]
    printer.table(("", "value"), rows)
    printer.text()
    printer.text(f"kept in {result.path}; ensemblekit conform {result.path} --undo removes them")


def _print_removed(path: Path, removed: bool, what: str, as_json: bool) -> None:
    from ensemblekit.display.console import Printer

    if as_json:
        Printer().json({"removed": removed, "path": str(path)})
    else:
        Printer().text(f"removed: the {what} of {path}" if removed else f"{path} has no {what}")


def _print_notices(notices: Sequence[str], as_json: bool) -> None:
    from ensemblekit.display.console import Printer

    for notice in notices:
        if as_json:
            click.echo(f"note: {notice}", err=True)
        else:
            Printer().text(f"note: {notice}")


COMMANDS = {"Use a trained ensemble": (calibrate, conform)}
