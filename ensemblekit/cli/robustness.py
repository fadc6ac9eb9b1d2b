"""The options of evaluate about other data and corrupted images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemblekit.core.errors import UsageError


def robustness_options(ood: str | None, corrupt: str | None, severities: str | None) -> dict[str, Any]:
    """Return the arguments of `evaluate_run` for --ood, --corrupt and --severities."""
    options: dict[str, Any] = {}
    if ood is not None:
        options["ood"] = parse_data(ood, "--ood")
    if severities is not None and corrupt is None:
        raise UsageError("--severities is about corrupted images", "evaluate", "add --corrupt")
    if corrupt is not None:
        options["corrupt"] = corrupt == "all" or [name.strip() for name in corrupt.split(",") if name.strip()]
        try:
            options["severities"] = [int(severity) for severity in (severities or "1,2,3,4,5").split(",")]
        except ValueError as error:
            fix = "write numbers from 1 to 5: --severities 1,3,5"
            raise UsageError(f'expected severities, got "{severities}"', "--severities", fix) from error
    return options


def print_robustness(evaluated: str, metrics: Mapping[str, Any], ood: str | None, is_corrupted: bool) -> None:
    """Print the tables of other data and of corrupted images."""
    from ensemblekit.display.console import Printer
    from ensemblekit.display.robustness import print_corruptions, print_ood

    printer = Printer()
    if ood is not None:
        print_ood(printer, metrics, evaluated, ood)
    if is_corrupted:
        if ood is not None:
            printer.text()
        print_corruptions(printer, metrics, evaluated)


def parse_data(text: str, option: str, example: str = '{name="image_folder", path="…"}') -> Any:
    """Return the value of --data or --ood, parsed as the values of --set are."""
    from ensemblekit.spec.tables import parse_override

    try:
        return parse_override(f"data={text}")[1]
    except UsageError as error:
        fix = f"write a name, or a table: {example}"
        raise UsageError(f'"{text}" is neither a name nor a TOML table', option, fix) from error
