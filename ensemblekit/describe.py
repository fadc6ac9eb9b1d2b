"""What `inspect` shows of a plugin, built from its docstring, its fields and its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ensemblekit.hooks import implemented_hooks
from ensemblekit.parameters import Parameter, parameters, toml_value
from ensemblekit.registry import PluginInfo

_HEADERS = {"method": "[method]", "model": "[model]", "dataset": "[data]", "loss": "[training.loss]"}


def plugin_page(info: PluginInfo) -> dict[str, Any]:
    """Everything there is to know of a plugin, as plain values; imports it."""
    plugin_class = info.load()
    description, _, details = (inspect.getdoc(plugin_class) or "").partition("\n")
    fields = parameters(plugin_class)
    return {
        "name": info.name,
        "kind": info.kind,
        "description": description.strip(),
        "details": " ".join(details.split()),
        "formula": plugin_class.formula,
        "paper": plugin_class.paper,
        "parameters": [vars(field) for field in fields],
        "hooks": sorted(implemented_hooks(plugin_class)),
        "package": info.package,
        "version": info.version,
        "snippet": snippet(info, fields),
    }


def snippet(info: PluginInfo, fields: Sequence[Parameter]) -> str:
    """TOML that selects the plugin with its defaults, ready to paste; what has no default is commented out."""
    if info.kind not in _HEADERS:
        return ""
    lines = [(f'name = "{info.name}"', "")]
    for field in fields:
        value = f"{field.name} = {toml_value(field.default)}" if field.default is not None else f"# {field.name} = …"
        lines.append((value, f"# {'required: ' if field.required else ''}{field.allowed}"))
    width = max(len(line) for line, _ in lines)
    return "\n".join([_HEADERS[info.kind], *(f"{line:<{width}}  {note}".rstrip() for line, note in lines)])
