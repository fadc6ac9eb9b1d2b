"""What `inspect` shows of a plugin, from its docstring, fields and hooks, and what `validate` shows of a spec."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ensemblekit.hooks import implemented_hooks
from ensemblekit.parameters import Parameter, parameters, toml_value
from ensemblekit.registry import PluginInfo

if TYPE_CHECKING:
    from ensemblekit.spec import Spec

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


def spec_overview(spec: Spec) -> list[tuple[str, str]]:
    """What a spec will run, as pairs of a label and words."""

    def words(table: dict[str, Any]) -> str:
        settings = ", ".join(f"{key} = {toml_value(value)}" for key, value in table.items() if key != "name")
        return f"{table['name']} ({settings})" if settings else str(table["name"])

    rows = [
        ("data", words(spec.data.to_table())),
        ("model", words(spec.model.to_table())),
        ("members", str(spec.ensemble.members)),
    ]
    for method in spec.methods:
        rows += [("method", words(method.to_table())), ("  minimises", method.formula)]
    if not spec.methods:
        rows.append(("method", "none: members are trained independently"))
    return [
        *rows,
        ("loss", words(spec.loss.to_table())),
        ("optimizer", words(spec.optimizer.to_table())),
        ("schedule", words(spec.schedule.to_table())),
        ("training", f"{spec.training.epochs} epochs, batches of {spec.training.batch_size}"),
        ("engine", f"{spec.engine.name} on {spec.engine.device}"),
        ("seed", str(spec.seed)),
    ]
