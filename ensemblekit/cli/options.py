"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ensemblekit.cli.completion import complete_device, complete_directory, complete_setting, complete_spec
from ensemblekit.core.errors import UsageError
from ensemblekit.core.kinds import KINDS

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
plugin_option = click.option(
    "--plugin",
    "plugin_files",
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help="Also use the plugin classes of this Python file (class SoftMin becomes soft_min). Repeatable.",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_setting,
    help="Override a value of the spec, for example: --set training.epochs=3. Repeatable.",
)
inference_device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    shell_complete=complete_device,
    help="Device to compute on: cpu, cuda, cuda:1, mps or auto.",
)
kind_option = click.option("--kind", type=click.Choice(list(KINDS)), help="Kind of plugin, if the name is ambiguous.")
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress; print only the path of the run.")
spec_argument = click.argument(
    "spec_file", metavar="SPEC", type=click.Path(path_type=Path), shell_complete=complete_spec
)
run_argument = click.argument(
    "run_path", metavar="RUN", type=click.Path(path_type=Path), shell_complete=complete_directory
)


@contextmanager
def counting_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows on a terminal how many of how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("")
        yield lambda done, total: display.update(task, completed=done, total=total)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn a failure to write the file that a user named into a usage error."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise UsageError(what, str(path), "name a file in a directory that you may write to") from error
