"""The commands about plugins: list, inspect, plugins, new, check."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.completion import complete_directory, complete_page, complete_parameter, complete_target
from ensemblekit.cli.options import json_option, kind_option, plugin_option
from ensemblekit.core.errors import PluginError, UsageError, did_you_mean
from ensemblekit.core.kinds import KINDS

if TYPE_CHECKING:
    from ensemblekit.core.registry import PluginInfo, Registry


@click.command("list")
@click.argument("plural", metavar="[KIND]", required=False, type=click.Choice([kind.plural for kind in KINDS.values()]))
@plugin_option
@json_option
def list_plugins(plural: str | None, plugin_files: Sequence[str], as_json: bool) -> None:
    """List the installed plugins, all or those of one kind.

    Nothing is imported, so a broken plugin does no harm; `ensemblekit plugins` imports all plugins and reports
    broken ones. Only `list datasets` imports its plugins, to show size, shape and whether the data is present; a
    broken one is listed with its error.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.display.plugin_pages import BRIEF, DETAILED, list_kind, print_kind

    registry, printer = discover(plugin_files), Printer()
    kinds = {kind.plural: kind.name for kind in KINDS.values()}
    if plural is not None:
        listing = DETAILED.get(kinds[plural], BRIEF)
        facts = list_kind(registry, kinds[plural], listing)
        built_in = KINDS[kinds[plural]].built_in
        if as_json:
            printer.json(facts)
        elif facts:
            print_kind(printer, facts, listing)
        else:
            printer.text(f"no {plural} are installed" if not built_in else f"no {plural} of plugins are installed")
        if built_in and not as_json:
            printer.text(f"built in: {built_in}")
        return
    found = {plural: list_kind(registry, kind, BRIEF) for plural, kind in kinds.items()}
    if as_json:
        printer.json(found)
        return
    for plural, facts in found.items():
        if facts:
            printer.heading(plural)
            print_kind(printer, facts, BRIEF)
            printer.text()


@click.command("inspect")
@click.argument("name", metavar="[KIND:]NAME|SECTION", shell_complete=complete_page)
@kind_option
@plugin_option
@json_option
def inspect_plugin(name: str, kind: str | None, plugin_files: Sequence[str], as_json: bool) -> None:
    """Explain a plugin, or a section of a spec.

    For a plugin: formula, parameters, hooks, origin. SECTION is a section of a spec, such as training, engine or
    training.optimizer; optimizer:adam explains one optimizer.

    Ends with TOML to paste into a spec.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.display.plugin_pages import print_page

    page = _page(name, kind, discover(plugin_files))
    printer = Printer()
    if as_json:
        printer.json(page)
    else:
        print_page(printer, page)


def _page(name: str, kind: str | None, registry: Registry) -> dict[str, Any]:
    """The page of a plugin; of a section, if no plugin has that name."""
    from ensemblekit.core.description import plugin_page
    from ensemblekit.core.lookup import find_plugin
    from ensemblekit.spec.keys import SECTIONS

    info = find_plugin(name, registry, kind)
    if info is None and kind is None:
        from ensemblekit.spec.pages import section_page

        if (page := section_page(name, registry)) is not None:
            return page
    if info is None:
        known = [*(info.name for info in registry), *(SECTIONS if kind is None else ())]
        near = did_you_mean(name.rpartition(":")[2], known)
        raise UsageError(f'no plugin "{name}"', fix=f"{near} ensemblekit list shows the installed plugins".strip())
    page = plugin_page(info)
    if info.kind == "model":
        from ensemblekit.engines.capabilities import default_capabilities

        page["paths"] = default_capabilities(info.load())
    return page


@click.command()
@plugin_option
@json_option
def plugins(plugin_files: Sequence[str], as_json: bool) -> None:
    """Show the installed plugin packages and broken plugins.

    Imports every plugin; the error of a broken one is a warning.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.core.streams import report
    from ensemblekit.display.console import Printer
    from ensemblekit.display.plugin_pages import packages, print_packages

    found, printer = packages(discover(plugin_files)), Printer()
    if as_json:
        printer.json(found)
        return
    print_packages(printer, found)
    for package in found:
        for error in package["broken"].values():
            report(f"warning: {error}")


@click.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--kind",
    type=click.Choice([kind.name for kind in KINDS.values() if kind.template]),
    default="method",
    show_default=True,
    help="Kind of plugin to start.",
)
@click.option(
    "--dir",
    "parent",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
    default=Path(),
    help="Where to create the directory NAME. Default: the current directory.",
)
@json_option
def new(name: str, kind: str, parent: Path, as_json: bool) -> None:
    """Start a plugin package: a working example with tests and a spec.

    NAME may be written soft-min, soft_min or SoftMin; in specs the plugin is called soft_min.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.scaffold.packages import create

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


@click.command()
@click.argument("target", metavar="[KIND:]NAME|PACKAGE|FILE", shell_complete=complete_target)
@kind_option
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_parameter,
    help="Set a parameter of the plugin, for example: --set temperature=0.5. Repeatable.",
)
@json_option
def check(target: str, kind: str | None, settings: Sequence[str], as_json: bool) -> None:
    """Check that a plugin keeps its contract.

    NAME is a registered plugin, PACKAGE an installed package with plugins, FILE a Python file with plugin classes.
    Every failure is explained, and the exit code is 4 if there is one. Nothing is downloaded.
    """
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.tables import override, parse_override
    from ensemblekit.testing.targets import find_targets

    registry, targets = find_targets(target, kind)
    table: dict[str, Any] = {}
    for key, value in (parse_override(setting) for setting in settings):
        override(table, key, value)
    if table and len(targets) > 1:
        names = ", ".join(info.name for info in targets)
        raise UsageError(f"{target} has several plugins: {names}", "--set", "check one of them by its name")
    rows = [row for info in targets for row in _check_rows(info, registry, table, alone=len(targets) == 1)]
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
        names = ", ".join(dict.fromkeys(row["plugin"] for row in failed))
        raise PluginError(f"{len(failed)} of {len(rows)} checks failed", names, "see the results above")


def _check_rows(
    info: PluginInfo, registry: Registry, table: Mapping[str, Any], alone: bool
) -> Iterator[dict[str, Any]]:
    """A row for each check; `passed` is None for a plugin that is skipped because a required parameter is missing."""
    from ensemblekit.testing.contracts import run_contract
    from ensemblekit.testing.targets import make, needed

    about = {"plugin": info.name, "kind": info.kind, "package": info.package}
    if info.error is not None:
        yield about | {"check": "it can be imported", "passed": False, "message": info.error, "seconds": 0.0}
        return
    missing = needed(info.load())
    if missing and not table:
        if alone:
            raise UsageError(f'{info.kind} "{info.name}" needs {missing}', fix="add it, so that it can be checked")
        yield about | {"check": "", "passed": None, "message": f"it needs {missing}", "seconds": 0.0}
        return
    for result in run_contract(make(info, registry, table)):
        facts = asdict(result)
        yield about | {"check": facts.pop("name")} | facts


COMMANDS = {"Plugins": (list_plugins, inspect_plugin, plugins, new, check)}
