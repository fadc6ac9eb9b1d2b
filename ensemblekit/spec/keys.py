"""The dotted keys that `--set` can override, for shell completion: read from source files, so that nothing is imported.

Completion has to answer while a person types; importing torch would take seconds. So the fields of sections and
plugins are read from the syntax trees of their modules. A key that cannot be found this way is only not suggested.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.kinds import KINDS
from ensemblekit.core.registry import Registry, find_module
from ensemblekit.spec.shipped import plugin_name

_SECTIONS = {
    "ensemble": "ensemblekit.spec.sections:EnsembleSection",
    "training": "ensemblekit.spec.sections:TrainingSection",
    "engine": "ensemblekit.spec.sections:EngineSection",
    "training.schedule": "ensemblekit.spec.schedules:Schedule",
    "sweep": "ensemblekit.spec.sweep:SweepSection",
}
_PLUGINS = {
    "data": "dataset",
    "model": "model",
    "method": "method",
    "ensemble.combiner": "combiner",
    "training.loss": "loss",
    "training.schedule": "schedule",
    "training.mix": "mix",
    "metrics": "metric",
    "extensions": "extension",
}
_BASES = {kind.name: kind.base.partition(":")[2] for kind in KINDS.values()}
"""By the kind of a plugin, the class that the annotation of such a field names."""
SECTIONS = (
    "seed",
    "data",
    "model",
    "method",
    "ensemble",
    "ensemble.groups",
    "ensemble.combiner",
    "training",
    "training.loss",
    "training.optimizer",
    "training.schedule",
    "training.mix",
    "engine",
    "metrics",
    "extensions",
    "sweep",
)
"""The parts of a spec, which `ensemblekit inspect` explains."""
_ALWAYS = ("seed", "training.optimizer.name", "training.optimizer.lr")


def spec_keys(tables: Mapping[str, Any], registry: Registry) -> list[str]:
    """List the keys that can be set in a spec.

    Args:
        tables: The spec as plain tables; its plugins decide which parameters there are. May be empty.
        registry: The plugins that the spec may name.

    Returns:
        Dotted paths such as `training.epochs`, sorted.
    """
    keys = {*_ALWAYS, *_leaves(tables)}
    for path, target in _SECTIONS.items():
        keys |= {f"{path}.{field}" for field in field_names(target)}
    for path, kind in _PLUGINS.items():
        keys.add(f"{path}.name")
        for path_of_one, section in sections_at(tables, path):
            keys |= set(_plugin_keys(path_of_one, section, kind, registry))
    return sorted(keys)


def _plugin_keys(path: str, section: Any, kind: str, registry: Registry) -> Iterator[str]:
    """The keys of the plugin that a section names, and of the plugins that are parameters of it."""
    plugin = registry.plugins(kind).get(plugin_name(section))
    for field, annotation in _fields(plugin.target) if plugin is not None else ():
        yield f"{path}.{field}"
        inner_kind = next((kind for kind, base in _BASES.items() if re.search(rf"\b{base}\b", annotation)), None)
        if inner_kind is not None and isinstance(section, Mapping):
            yield f"{path}.{field}.name"
            for inner_path, inner in sections_at(section, field):
                yield from _plugin_keys(f"{path}.{inner_path}", inner, inner_kind, registry)


def sections_at(tables: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the sections at a dotted path, each with its own: one, or those of a list, as methods compose."""
    value: Any = tables
    for key in path.split("."):
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    if not isinstance(value, list):
        yield path, value
        return
    for index, section in enumerate(value):
        yield f"{path}.{index}", section


def field_names(target: str) -> list[str]:
    """The names in TOML of a class's fields, inherited ones first; `target` is `module:Class`."""
    return [name for name, _ in _fields(target)]


def _fields(target: str) -> list[tuple[str, str]]:
    """The fields of a class, each with its annotation."""
    module, _, class_name = target.partition(":")
    found = find_module(module)
    if found is None or found.origin is None:
        return []
    tree = ast.parse(Path(found.origin).read_bytes())
    if (node := _class_node(tree.body, class_name)) is not None:
        bases = [ast.unparse(base) for base in node.bases]
        inherited = [field for base in bases for field in _fields(_imported_from(tree, base, module))]
        return [*inherited, *_own_fields(node)]
    imported = _imported_from(tree, class_name, module)  # a package may re-export the class
    return _fields(imported) if imported != target else []


def _class_node(statements: list[ast.stmt], name: str) -> ast.ClassDef | None:
    """Find a class by its name; `Outer.Inner` is a class in another one."""
    outer, _, inner = name.partition(".")
    for node in statements:
        if isinstance(node, ast.ClassDef) and node.name == outer:
            return _class_node(node.body, inner) if inner else node
    return None


def _imported_from(tree: ast.Module, name: str, module: str) -> str:
    """Where a module has a name from, as `module:Class`: an import, or else the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith("ensemblekit"):
                    return f"{node.module}:{alias.name}"
    return f"{module}:{name}"


def _own_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        name, annotation = statement.target.id, ast.unparse(statement.annotation)
        if name.startswith("_") or "ClassVar" in annotation:
            continue
        keywords = statement.value.keywords if isinstance(statement.value, ast.Call) else []
        aliases = [
            word.value.value for word in keywords if word.arg == "alias" and isinstance(word.value, ast.Constant)
        ]
        yield str(aliases[0]) if aliases else name, annotation


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of every value, as far as tables go; a list is one value."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
