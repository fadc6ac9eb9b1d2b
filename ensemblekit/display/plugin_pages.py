"""What the commands list, inspect and plugins show: the facts as plain values, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.description import dataset_facts, dataset_row, page_facts
from ensemblekit.core.errors import EnsemblekitError, ResourceError, explain
from ensemblekit.core.parameters import toml_value
from ensemblekit.core.registry import PluginInfo, Registry
from ensemblekit.display.console import Printer

Facts = dict[str, Any]


def summary(info: PluginInfo) -> Facts:
    """Name, kind, description, package and version of a plugin; imports nothing."""
    return {
        "name": info.name,
        "kind": info.kind,
        "description": "registered twice: see ensemblekit plugins" if info.rivals else info.description,
        "package": info.package,
        "version": info.version,
    }


def _dataset_summary(info: PluginInfo) -> Facts:
    """The summary of a data set with its size, shape and location on disk, or with its error; imports it."""
    try:
        return {**summary(info), **dataset_facts(cast("type[Dataset]", info.load())), "error": None}
    except (KeyboardInterrupt, ResourceError):
        raise
    except BaseException as error:  # its own code may raise anything, SystemExit included
        reason = error if isinstance(error, EnsemblekitError) else explain(error)
        return {**summary(info), "error": reason.line}


@dataclass(frozen=True)
class Listing:
    """How plugins are listed: the facts of each one, and its row in a table."""

    columns: tuple[str, ...]
    facts: Callable[[PluginInfo], Facts]
    row: Callable[[Facts], Sequence[str]]


BRIEF = Listing(
    ("name", "description", "package"),
    summary,
    lambda facts: (facts["name"], facts["description"], f"{facts['package']} {facts['version']}"),
)
DETAILED = {
    "dataset": Listing(("name", "description", "samples", "shape", "outputs", "present"), _dataset_summary, dataset_row)
}
"""Kinds with a listing of their own, shown when only this kind is listed."""


def list_kind(registry: Registry, kind: str, listing: Listing) -> list[Facts]:
    """The facts of every plugin of one kind, sorted by name."""
    return [listing.facts(info) for info in registry.plugins(kind).values()]


def print_kind(printer: Printer, facts: Iterable[Facts], listing: Listing) -> None:
    """Print the plugins of one kind as a table."""
    printer.table(listing.columns, [listing.row(entry) for entry in facts])


def print_page(printer: Printer, page: Mapping[str, Any]) -> None:
    """Print everything about a plugin or a section: what `plugin_page` or `section_page` returns."""
    printer.heading(f"{page['name']} ({page['kind']})")
    printer.text(page["description"])
    if page["details"]:
        printer.text(page["details"])
    printer.text()
    for label, fact in page_facts(page):
        for index, line in enumerate(fact.splitlines()):
            printer.text(f"{label if index == 0 else '':<11}{line}")
    rows = [
        (field["name"], field["type"], _default(field), field["allowed"], field["description"])
        for field in page["parameters"]
    ]
    if rows:
        printer.text()
    printer.table(("parameter", "type", "default", "allowed", "meaning"), rows)
    if page["snippet"]:
        printer.text()
        printer.verbatim(page["snippet"])


def _default(field: Mapping[str, Any]) -> str:
    if field["required"]:
        return "required"
    return "" if field["default"] is None else toml_value(field["default"])


def packages(registry: Registry) -> list[Facts]:
    """The installed packages: version, the plugins each adds by kind, and the error of each broken one; imports all."""
    found: dict[str, Facts] = {}
    for info in registry:
        package = found.setdefault(
            info.package, {"package": info.package, "version": info.version, "adds": {}, "broken": {}}
        )
        if info.error:
            package["broken"][f"{info.kind} {info.name}"] = info.error
        else:
            package["adds"].setdefault(info.kind, []).append(info.name)
    return list(found.values())


def print_packages(printer: Printer, found: Sequence[Facts]) -> None:
    """Print a row for each package and kind of plugin."""
    rows = [
        (package["package"], package["version"], kind, ", ".join(names))
        for package in found
        for kind, names in package["adds"].items()
    ]
    printer.table(("package", "version", "kind", "adds"), rows)
