"""The command that starts a plugin package."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ensemblekit.cli.options import json_option

# Those that `ensemblekit.scaffold` has templates for; it imports pydantic, and help must not.
KINDS = ("method", "model", "dataset", "extension")


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--kind", type=click.Choice(KINDS), default="method", show_default=True, help="What the package adds.")
@click.option(
    "--dir",
    "parent",
    metavar="D",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where the directory NAME is made. Default: here.",
)
@json_option
def new(name: str, kind: str, parent: Path, as_json: bool) -> None:
    """Start a plugin package: a working example of a method, model, data set or extension, its tests and a spec.

    NAME may be written soft-min, soft_min or SoftMin. In specs it is soft_min.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.scaffold import create

    package = create(name, kind, parent, discover())
    directory = shlex.quote(str(package.directory))
    spec = shlex.quote(str(package.directory / "spec.toml"))
    commands = f"pip install -e {directory} && pytest {directory} && ensemblekit train {spec}"
    printer = Printer()
    if as_json:
        paths = [str(file) for file in package.files]
        printer.json({"directory": str(package.directory), "files": paths, "next": commands})
        return
    for file in package.files:
        printer.verbatim(str(file))
    printer.text()
    printer.text("next:")
    printer.verbatim(f"  {commands}")
