"""Finds the plugins to check: by a registered name, in an installed package, or in a Python file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import UsageError, did_you_mean
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.lookup import find_plugin
from ensemblekit.core.nesting import replaced
from ensemblekit.core.parameters import parameters
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.registry import PluginInfo, Registry, discover
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.spec.reader import build_plugin
from ensemblekit.testing.toy_run import required_plugins, with_toys


def find_targets(text: str, kind: str | None = None) -> tuple[Registry, list[PluginInfo]]:
    """Find the plugins to check.

    Args:
        text: `NAME`, `KIND:NAME`, `PACKAGE` or `FILE.py`.
        kind: Only plugins of this kind; the same as the prefix of `text`.

    Returns:
        The registry of all plugins, and the entries that `text` stands for.

    Raises:
        UsageError: if nothing has this name, or plugins of several kinds have it.
    """
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
    """Return all plugins of a distribution, whose name is compared as pip compares names."""
    matches = [info for info in registry if _plain(text) in map(_plain, (info.package, *info.rivals))]
    if matches:
        return matches
    known = {*(info.name for info in registry), *(info.package for info in registry)}
    fix = f"{did_you_mean(text, known)} ensemblekit list shows the installed plugins; a file ends with .py"
    raise UsageError(f'there is no plugin and no package with plugins called "{text}"', fix=fix.strip())


def _plain(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")


def needed(plugin_class: type[Plugin]) -> str:
    """Describe what a plugin cannot be constructed without.

    Args:
        plugin_class: The class of the plugin.

    Returns:
        Its required parameters as options of `ensemblekit check`, without those that are plugins, for which the kit
        has simple ones; "" if there is none.
    """
    if issubclass(plugin_class, InMemoryData):
        return "in-memory data, from Python"
    inner = required_plugins(plugin_class)
    required = [parameter.name for parameter in parameters(plugin_class) if parameter.required]
    return ", ".join(f"--set {name}=…" for name in required if name not in inner)


def make(info: PluginInfo, registry: Registry, settings: Mapping[str, Any]) -> Plugin:
    """Construct a plugin.

    Args:
        info: The plugin's entry in the registry.
        registry: Where plugins that are parameters of this one are looked up.
        settings: Its parameters; required ones that are plugins have a default, a simple plugin of the kit.

    Returns:
        The plugin.

    Raises:
        SpecError: if the parameters are not valid, as for a spec that contains them.
        PluginError: if the plugin cannot be imported.
    """
    inner = required_plugins(info.load())
    tables = replaced(Plugin, inner, lambda plugin: plugin.to_table())
    table = {"name": info.name, **tables, **settings}
    return build_plugin(KINDS[info.kind].base_class, table, with_toys(registry, inner))
