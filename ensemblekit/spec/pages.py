"""Facts about the sections of a spec for `inspect`, in the form of a plugin's page."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from ensemblekit.core.description import snippet
from ensemblekit.core.errors import UsageError, choices
from ensemblekit.core.parameters import Parameter
from ensemblekit.core.registry import Registry
from ensemblekit.spec.entries import ChoiceEntry, Entry, IntegerEntry, PluginsEntry, SectionEntry
from ensemblekit.spec.groups import GroupsEntry
from ensemblekit.spec.sections import ENTRIES

_ABOUT = {
    "seed": "The seed of every random number of a run: the same spec and seed give the same result.",
    "data": "The data set: the name of a plugin and its parameters.",
    "model": "The network of a member: the name of a plugin and its parameters.",
    "method": "The ensembling method: the name of a plugin and its parameters, or a list of methods that compose.",
    "ensemble.groups": "Groups of members with models of their own: [[ensemble.groups]] for each.",
    "ensemble.combiner": "The combiner of the members' outputs in evaluations and predictions: a name, or a table.",
    "training.loss": "The loss that members and ensemble are trained on: a name, or a table with its parameters.",
    "training.optimizer": "The optimizer of the members: a name, or a table with its arguments.",
    "training.schedule": "The factor of the learning rate during training: a name, or a table with its settings.",
    "training.mix": "The mixture of training samples with others of their batch, such as mixup: a name, or a table.",
    "metrics": "Metrics beside the built-in ones: a list of names or tables.",
    "extensions": "Loggers and callbacks that observe a run: [[extensions]] for each.",
}


def section_page(path: str, registry: Registry) -> dict[str, Any] | None:
    """Return all facts about a section as plain values.

    Args:
        path: its dotted path, such as `training`, or one choice of a section: `optimizer:adam`.
        registry: the plugins that a section can name.

    Returns:
        The same keys as `plugin_page`, and the `names` to choose from; None if there is no such section.

    Raises:
        UsageError: the section has no such choice.
    """
    kind, colon, name = path.rpartition(":")
    for entry in ENTRIES.values():
        if not colon and entry.path == path:
            return _page(entry, registry)
        if colon and isinstance(entry, ChoiceEntry) and entry.path.rpartition(".")[2] == kind:
            return _choice_page(entry, kind, name, registry)
    return None


def _page(entry: Entry, registry: Registry) -> dict[str, Any]:
    names = sorted(entry.choices(registry))
    fields = [*entry.fields(registry), *(_as_key(other) for other in _entries_below(entry.path))]
    chosen = getattr(entry, "default", None) or "…" if names else None
    if fields or names:
        page = _facts(entry.path, "section", _about(entry), fields, snippet(_header(entry), fields, chosen))
    else:
        page = _facts(entry.path, "section", _about(entry), [_as_key(entry)], snippet("", [_as_key(entry)]))
    page["names"] = names
    if isinstance(entry, ChoiceEntry):
        kind = entry.path.rpartition(".")[2]
        page["details"] = f"The keys below are those of {chosen}; for another: ensemblekit inspect {kind}:NAME"
    elif names:
        page["details"] = "ensemblekit inspect NAME explains one of the names."
    return page


def _header(entry: Entry) -> str:
    several = isinstance(entry, GroupsEntry) or (isinstance(entry, PluginsEntry) and not entry.single)
    return f"[[{entry.path}]]" if several else f"[{entry.path}]"


def _choice_page(entry: ChoiceEntry, kind: str, name: str, registry: Registry) -> dict[str, Any]:
    if name not in entry.names():
        raise UsageError(f'there is no {kind} "{name}"', fix=choices(name, entry.names()))
    fields = entry.fields(registry, name)
    return _facts(name, kind, _first_line(entry.section_of(name)), fields, snippet(f"[{entry.path}]", fields, name))


def _facts(name: str, kind: str, about: str, fields: list[Parameter], toml: str) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "description": about,
        "details": "",
        "formula": "",
        "paper": "",
        "parameters": [vars(field) for field in fields],
        "hooks": [],
        "package": "ensemblekit",
        "version": version("ensemblekit"),
        "snippet": toml,
    }


def _about(entry: Entry) -> str:
    return _first_line(entry.section) if isinstance(entry, SectionEntry) else _ABOUT[entry.path]


def _first_line(section: type) -> str:
    return (section.__doc__ or "").partition("\n")[0]


def _entries_below(path: str) -> list[Entry]:
    return [entry for entry in ENTRIES.values() if entry.path.startswith(f"{path}.")]


def _as_key(entry: Entry) -> Parameter:
    """Describe a part of a spec as one key, of the section above it or of the spec."""
    key = entry.path.rpartition(".")[2]
    about = _about(entry).partition(":")[0].lower()
    if isinstance(entry, IntegerEntry):
        return Parameter(key, "integer", 0, False, f"integer ≥ 0 and ≤ {entry.maximum}", about)
    kind = "list of tables" if isinstance(entry, GroupsEntry) else "name or table"
    about = f"{about}: see ensemblekit inspect {entry.path}"
    return Parameter(key, kind, getattr(entry, "default", None), False, kind, about)
