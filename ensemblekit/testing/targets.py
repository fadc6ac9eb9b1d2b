"""Which plugins a person means: a registered name, an installed package, or a Python file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import UsageError, did_you_mean
from ensemblekit.core.lookup import find_plugin
from ensemblekit.core.losses import Loss
from ensemblekit.core.parameters import parameters
from ensemblekit.core.plugin import Dataset, Extension, Method, Model, Plugin
from ensemblekit.core.registry import PluginInfo, Registry, discover
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.spec.reader import build_plugin

BASES: dict[str, type[Plugin]] = {base.kind: base for base in (Method, Model, Dataset, Loss, Extension)}


def find_targets(text: str, kind: str | None = None) -> tuple[Registry, list[PluginInfo]]:
    """The plugins that `NAME`, `KIND:NAME`, `PACKAGE` or `FILE.py` stands for, and the registry that they are in."""
    if text.endswith(".py"):
        registry = discover([text])
        return registry, [info for info in registry if str(Path(text)) in (info.package, *info.rivals)]
    registry = discover()
    plugin = find_plugin(text, registry, kind)
    if plugin is not None:
        return registry, [plugin]
    prefix, _, name = text.rpartition(":")
    if kind or prefix:
        return registry, [registry.get(kind or prefix, name)]  # which raises: no plugin of this kind has the name
    return registry, _of_package(Path(text).name if Path(text).is_dir() else text, registry)


def _of_package(text: str, registry: Registry) -> list[PluginInfo]:
    """All plugins of a distribution; names of packages are compared as pip compares them."""
    found = [info for info in registry if _plain(text) in map(_plain, (info.package, *info.rivals))]
    if found:
        return found
    known = {*(info.name for info in registry), *(info.package for info in registry)}
    fix = f"{did_you_mean(text, known)} ensemblekit list shows all that are installed; a file is given as FILE.py"
    raise UsageError(f'no plugin and no package with plugins is called "{text}"', fix=fix.strip())


def _plain(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")


def needed(plugin_class: type[Plugin]) -> str:
    """What a plugin cannot be made without, in words; "" if its defaults will do."""
    if issubclass(plugin_class, InMemoryData):
        return "data that is given in Python"
    return ", ".join(f"--set {parameter.name}=…" for parameter in parameters(plugin_class) if parameter.required)


def make(info: PluginInfo, registry: Registry, settings: Mapping[str, Any]) -> Plugin:
    """The plugin with these parameters; errors are those of a spec that says so."""
    info.load()
    return build_plugin(BASES[info.kind], {"name": info.name, **settings}, registry)
