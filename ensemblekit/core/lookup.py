"""Finds the plugin that a person names on the command line: `NAME`, or `KIND:NAME` where kinds share a name."""

from __future__ import annotations

from ensemblekit.core.errors import UsageError, choices
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.registry import PluginInfo, Registry


def find_plugin(text: str, registry: Registry, kind: str | None = None) -> PluginInfo | None:
    """Find one plugin by its name.

    Args:
        text: `NAME` or `KIND:NAME`, such as `gncl` or `method:gncl`.
        registry: The plugins to search.
        kind: Only plugins of this kind; the same as the prefix of `text`.

    Returns:
        The plugin, or None if no plugin has this name.

    Raises:
        UsageError: The kind is unknown, two different kinds are named, or plugins of several kinds share the name.
    """
    prefix, colon, name = text.rpartition(":")
    if colon:
        if prefix not in KINDS:
            raise UsageError(f'"{prefix}" is not a kind of plugin', text, choices(prefix, KINDS))
        if kind not in (None, prefix):
            raise UsageError(f"two kinds: {prefix} and {kind}", f"{text} --kind {kind}", "name one kind")
        kind = prefix
    matches = [info for info in registry.find(name) if kind in (None, info.kind)]
    if len(matches) > 1:
        kinds = ", ".join(info.kind for info in matches)
        fix = f"add the kind: {matches[0].kind}:{name} or --kind {matches[0].kind}"
        raise UsageError(f'several plugins are named "{name}"', f"kinds: {kinds}", fix)
    return matches[0] if matches else None
