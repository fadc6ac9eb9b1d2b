"""The command export: a trained ensemble in the formats of other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.options import json_option, plugin_option, run_argument

if TYPE_CHECKING:
    from ensemblekit.display.console import Printer
    from ensemblekit.export.formats import Exported, InputType

FORMATS = ("onnx", "torch", "hub")
"""Those of `ensemblekit.export.exporting`, which imports torch."""


@click.command()
@run_argument
@click.option(
    "--format", "export_format", type=click.Choice(FORMATS), default="onnx", show_default=True, help="Format."
)
@click.option(
    "--output",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Write to this file, which appears or is replaced once it was checked, or to this new or empty folder. "
    "Default: model.onnx, model.pt2 or the folder hub in RUN.",
)
@click.option(
    "--input-type",
    type=click.Choice(["uint8", "float32"]),
    help="Type of inputs that are stored as bytes, such as images: uint8 for 0 to 255, float32 for 0 to 1. Default: as "
    "the test data has them, else uint8 for images.",
)
@click.option("--licence", metavar="NAME", help="Licence of the model in the card of --format hub, for example MIT.")
@plugin_option
@json_option
def export(
    run_path: Path,
    export_format: str,
    output: Path | None,
    input_type: InputType | None,
    licence: str | None,
    plugin_files: Sequence[str],
    as_json: bool,
) -> None:
    """Write a trained ensemble as one graph, or as a folder for hubs.

    The graph takes batches of any size and contains everything: the preparation of the inputs, all members, how they
    are combined and calibrated, and the uncertainty. --format onnx is for onnxruntime and other runtimes (it needs the
    extra onnx), --format torch is for torch.export.load, without ensemblekit.

    The file is run beside the original on test samples, or on random inputs if the run's data cannot be read. If an
    output differs by more than 1e-4 (relative to its size if that is above 1), nothing is written: exit code 6.

    --format hub writes a folder in the form that model hubs take: model.safetensors, config.json, and README.md with a
    model card: task, data, metrics with intervals, calibration, limitations, how to load. ensemblekit predict and
    ensemblekit.load read it. Nothing is uploaded.
    """
    from rich.console import Console

    from ensemblekit.display.console import Printer
    from ensemblekit.export.exporting import export as export_run

    with Console(stderr=True).status("writing and checking"):  # on a terminal alone
        exported = export_run(run_path, export_format, output, input_type, licence, plugins=plugin_files)
    printer = Printer()
    if as_json:
        printer.json(exported.to_dict())
    else:
        print_exported(exported, printer)


def print_exported(exported: Exported, printer: Printer) -> None:
    """Print what was written, for a person."""
    for note in exported.notes:
        printer.text(f"note: {note}")
    printer.verbatim(f"{exported.path}  ({exported.num_bytes / 1000:,.0f} kB)")
    facts = exported.facts
    rows = [_row(kind, value) for kind in ("inputs", "outputs") for value in facts.get(kind, [])]
    if rows:
        printer.table(("", "name", "type", "shape", "content"), rows)
    if "files" in facts:
        printer.text(", ".join(facts["files"]))
    if "largest_difference" in facts:
        sizes = ", ".join(map(str, facts["batch_sizes"]))
        printer.text(
            f"largest difference from the original: {facts['largest_difference']:.1e}, on {facts['compared_on']} in "
            f"batches of {sizes}"
        )
    printer.text()
    printer.verbatim(exported.usage)


def _row(kind: str, value: Mapping[str, Any]) -> tuple[str, ...]:
    shape = ", ".join("batch" if size is None else str(size) for size in value["shape"])
    return kind.removesuffix("s"), value["name"], value["type"], f"({shape})", value["description"]


COMMANDS = {"Use a trained ensemble": (export,)}
