"""Reads a spec: reports every problem at once, each with its dotted path and what is allowed.

A spec can only name plugins that are installed or that a person passed on the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import PluginError, Problem, SpecError, UsageError, choices
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.registry import Registry
from ensemblekit.spec.entries import MISSING
from ensemblekit.spec.reading import AnyPlugin, Reader
from ensemblekit.spec.sections import ENTRIES, Spec
from ensemblekit.spec.tables import override, read_toml


def load_spec(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None, registry: Registry) -> Spec:
    """Read and validate a spec.

    Args:
        source: path of a TOML file, or its content as a mapping.
        overrides: values by dotted path.
        registry: the plugins that the spec may name.

    Raises:
        SpecError: with all problems of the spec.
    """
    label = "the spec" if isinstance(source, Mapping) else str(source)
    tables = dict(deepcopy(source)) if isinstance(source, Mapping) else read_toml(Path(source))
    reader = Reader(registry)
    for path, value in (overrides or {}).items():
        try:
            override(tables, path, value)
        except UsageError as error:
            reader.problem(error.where, error.what, error.fix)
    spec = _read(reader, tables)
    if spec is None or reader.problems:
        raise SpecError(reader.problems, label)
    return spec


def build_plugin(base: type[AnyPlugin], value: str | Mapping[str, Any], registry: Registry) -> AnyPlugin:
    """Build one plugin from its table, or from its name alone."""
    reader = Reader(registry)
    plugin = reader.plugin(base, value, base.kind)
    if plugin is None:
        raise SpecError(reader.problems, f"the {base.kind}")
    return plugin


def _read(reader: Reader, tables: dict[str, Any]) -> Spec | None:
    reader.tables = tables
    allowed = {entry.path.partition(".")[0] for entry in ENTRIES.values()}
    for key in tables:
        if key not in allowed:
            reader.problem(str(key), "unknown key", choices(str(key), allowed))
    for name, entry in ENTRIES.items():
        reader.values[name] = entry.read(reader, _value_at(tables, entry.path))
    if reader.problems:
        return None
    has_loss = _value_at(tables, "training.loss") is not MISSING
    spec = Spec(**reader.values, default_loss=None if has_loss else reader.values["loss"])
    reader.problems += plugin_problems(spec)
    return spec


def plugin_problems(spec: Spec) -> list[Problem]:
    """Return the problems that the plugins of a spec see in it."""
    problems = []
    for path, plugin in spec.plugins():
        for problem in _check(plugin, spec):
            elsewhere = problem.path.startswith("/")
            moved = Problem(problem.path[1:], problem.what, problem.fix) if elsewhere else problem.under(path)
            problems.append(moved)
    return problems


def _value_at(tables: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; a parent that is not a table is reported by the entry of the parent."""
    value: Any = tables
    for key in path.split("."):
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def _check(plugin: Plugin, spec: Spec) -> list[Problem]:
    """Return the problems that a plugin sees in a spec."""
    result: Any = plugin.check_spec(spec)
    problems = list(result) if isinstance(result, Iterable) else [result]
    if not all(isinstance(problem, Problem) for problem in problems):
        what = f'plugin "{plugin.name}": check_spec() returned something other than problems'
        raise PluginError(what, fix="yield Problem(…)", plugin=plugin.name)
    return problems
