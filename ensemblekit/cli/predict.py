"""The command that predicts new files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ensemblekit.cli.options import (
    inference_device_option,
    plugin_option,
    run_argument,
)
from ensemblekit.core.errors import DataError, UsageError
from ensemblekit.core.streams import report

if TYPE_CHECKING:
    from ensemblekit.inference.writing import FileFormat


@click.command()
@run_argument
@click.argument("files", metavar="FILES…", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["csv", "json", "parquet"]),
    help="Default: by the extension of --output, else csv.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write to this file, which appears or is replaced once it is complete. Default: standard output.",
)
@click.option("--probabilities", is_flag=True, help="Add the probability of every class: probability[NAME].")
@click.option("--members", is_flag=True, help="Add what each member predicts: member_class[0] … or member_value[0] …")
@click.option(
    "--abstain-above",
    metavar="X",
    type=float,
    help='Write "abstained" instead of the class where 1 - probability is above X (0 to 1).',
)
@click.option(
    "--stop-when-sure",
    is_flag=True,
    help="Ask members one after the other, and for each sample only until the rest cannot change its class. Exact for "
    "the combiners probabilities and vote; others need --risk.",
)
@click.option(
    "--risk",
    metavar="SHARE",
    type=float,
    help="With --stop-when-sure: stop earlier, so that at most this share of the classes is expected to differ from "
    "those of all members, for example 0.005. Fitted to the run's validation data.",
)
@inference_device_option
@plugin_option
def predict(
    run_path: Path,
    files: Sequence[str],
    file_format: FileFormat | None,
    as_json: bool,
    output: Path | None,
    probabilities: bool,
    members: bool,
    abstain_above: float | None,
    stop_when_sure: bool,
    risk: float | None,
    device: str,
    plugin_files: Sequence[str],
) -> None:
    """Predict classes or values for new files, with uncertainty.

    FILES are images (PNG, JPEG, WebP, BMP) if the run was trained on images. For a run on a table they are CSV,
    Parquet or NPZ files with its feature columns by name, in any order; other columns are left out. For a run on
    arrays they are CSV files with the features alone, in the order of the training data, and a header.

    A folder stands for all images, or all CSV and Parquet files, in it and below it, a quoted pattern such as
    "new/*.png" for the files that match it, and - for standard input: one image, or the rows of one CSV file.

    For classes: probability, share of members that agree, predictive entropy and mutual information (the part of the
    entropy that is due to disagreement). For values: standard deviation over the members. A run with prediction sets or
    intervals (ensemblekit conform) also prints these: set, or low and high.

    Files that cannot be read are listed at the end, with exit code 3; the others are predicted.
    """
    from ensemblekit import api
    from ensemblekit.inference.abstention import abstaining, check_abstention, num_abstained
    from ensemblekit.inference.files import opened
    from ensemblekit.inference.prediction import extensions, predictions
    from ensemblekit.inference.writing import choose_format, writer_to

    chosen = choose_format("json" if as_json and file_format is None else file_format, output)
    _check_stopping(stop_when_sure, risk, members)
    ensemble = api.load(run_path, plugins=plugin_files, device=device)
    if abstain_above is not None:
        check_abstention(ensemble, abstain_above)
    anytime = ensemble.anytime(risk) if stop_when_sure else None
    asked: list[int] = []
    abstained = total = 0
    with opened(files, extensions(ensemble)) as (found, failures):
        num_files = len(found) + len(failures)
        batches = predictions(ensemble, found, failures, probabilities, members, anytime)
        if abstain_above is not None:
            batches = abstaining(batches, abstain_above)
        first = next(batches, None)
        if first is not None:
            with writer_to(output, chosen) as writer:
                for batch in chain([first], batches):
                    writer.write([prediction.to_dict() for prediction in batch])
                    abstained, total = abstained + num_abstained(batch), total + len(batch)
                    asked += [int(one.answer["members_asked"]) for one in batch if anytime is not None]
    if abstain_above is not None and total:
        report(f"note: abstained from {abstained:,} of {total:,} predictions")
    if asked:
        mean, size = sum(asked) / len(asked), len(ensemble.members)
        report(f"asked {mean:.2f} of {size} members on average: {1 - mean / size:.1%} of the member passes saved")
    if failures:
        raise _failed(failures, num_files)


def _check_stopping(stop_when_sure: bool, risk: float | None, members: bool) -> None:
    if risk is not None and not stop_when_sure:
        raise UsageError("a risk is for predictions that stop early", "--risk", "add --stop-when-sure")
    if stop_when_sure and members:
        raise UsageError("not all members are asked", "--members with --stop-when-sure", "leave out one of them")


def _failed(failures: Sequence[DataError], num_files: int) -> DataError:
    """List files that could not be predicted; returns the error to end with."""
    if len(failures) == 1:
        return failures[0]
    for failure in failures:
        report(f"  {failure.line}")
    return DataError(f"{len(failures)} of {num_files} files could not be predicted", "", "each is listed above")


COMMANDS = {"Use a trained ensemble": (predict,)}
