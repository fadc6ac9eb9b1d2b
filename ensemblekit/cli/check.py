"""The command for plugin authors: check. Like all of the command line it imports late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.options import json_option
from ensemblekit.core.errors import PluginError, UsageError

if TYPE_CHECKING:
    from ensemblekit.core.registry import PluginInfo, Registry


@click.command()
@click.argument("target", metavar="NAME|PACKAGE|FILE")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Give the plugin a parameter, as in --set temperature=0.5. Repeatable.",
)
@json_option
def check(target: str, settings: Sequence[str], as_json: bool) -> None:
    """Check that a plugin keeps its contract, and say like a reviewer what it does not keep.

    NAME is a registered plugin (kind:NAME if several kinds have one of that name), PACKAGE an installed package with
    plugins, FILE a Python file with plugin classes. Ends with code 4 if a check fails. Nothing is downloaded.
    """
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.tables import override, parse_override
    from ensemblekit.testing.targets import find_targets

    registry, found = find_targets(target)
    table: dict[str, Any] = {}
    for key, value in (parse_override(setting) for setting in settings):
        override(table, key, value)
    if table and len(found) > 1:
        names = ", ".join(info.name for info in found)
        raise UsageError(f"{target} has several plugins: {names}", "--set", "check one of them by its name")
    rows = [row for info in found for row in _checked(info, registry, table, alone=len(found) == 1)]
    printer = Printer()
    if as_json:
        printer.json(rows)
    else:
        words = {True: "ok", None: "skipped: "}
        printer.table(
            ("plugin", "check", "result"),
            [(row["plugin"], row["check"], words.get(row["passed"], "") + row["message"]) for row in rows],
        )
    failed = [row for row in rows if row["passed"] is False]
    if failed:
        plugins = ", ".join(dict.fromkeys(row["plugin"] for row in failed))
        raise PluginError(f"{len(failed)} of {len(rows)} checks failed", plugins, "each says above where to look")


def _checked(info: PluginInfo, registry: Registry, table: Mapping[str, Any], alone: bool) -> Iterator[dict[str, Any]]:
    """A row for each check; `passed` is None for a check, or a whole plugin, that is skipped."""
    from ensemblekit.testing.contracts import run_contract
    from ensemblekit.testing.targets import make, needed

    about = {"plugin": info.name, "kind": info.kind, "package": info.package}
    if info.error is not None:
        yield about | {"check": "it can be imported", "passed": False, "message": info.error, "seconds": 0.0}
        return
    lacking = needed(info.load())
    if lacking and not table:
        if alone:
            raise UsageError(f'{info.kind} "{info.name}" needs {lacking}', fix="without it there is nothing to check")
        yield about | {"check": "", "passed": None, "message": f"it needs {lacking}", "seconds": 0.0}
        return
    for result in run_contract(make(info, registry, table)):
        facts = asdict(result)
        yield about | {"check": facts.pop("name")} | facts


COMMANDS = (check,)
