"""Hints for problems of a spec: which override causes one, and which key was meant by an unknown one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ensemblekit.core.errors import Problem
from ensemblekit.core.parameters import field_schemas, plugin_kind, short, toml_value
from ensemblekit.core.registry import Registry
from ensemblekit.spec.entries import PluginEntry, PluginsEntry, plugin_fields
from ensemblekit.spec.groups import GroupsEntry
from ensemblekit.spec.keys import sections_at
from ensemblekit.spec.sections import ENTRIES
from ensemblekit.spec.shipped import plugin_name

MAX_MEANT = 3
"""More keys of one name than this are no hint."""


def attribute(
    problems: Sequence[Problem],
    overrides: Mapping[str, Any],
    problems_with: Callable[[Mapping[str, Any]], list[Problem]],
) -> list[Problem]:
    """Attribute problems to the overrides that cause them; those of the spec itself stay as they are.

    An override causes a problem of its own key, and one that disappears without the override.

    Args:
        problems: the problems of the spec with all overrides.
        overrides: values by dotted path.
        problems_with: reads the spec with other overrides.
    """
    without = {path: {_identity(problem) for problem in problems_with(_others(overrides, path))} for path in overrides}
    own = {_identity(problem) for problem in problems_with({})}
    attributed = []
    for problem in problems:
        above = [path for path in overrides if _is_within(problem.path, path)]
        causes = (
            [max(above, key=len)] if above else [path for path in overrides if _identity(problem) not in without[path]]
        )
        if not causes and _identity(problem) not in own:  # several overrides cause it, each of them alone as well
            causes = list(overrides)
        attributed.append(_caused(problem, {path: overrides[path] for path in causes}))
    return attributed


def _caused(problem: Problem, causes: Mapping[str, Any]) -> Problem:
    if not causes:
        return problem
    for path, value in causes.items():
        section = path.removesuffix(".name")
        if problem.code == "unknown_key" and section != path and _is_within(problem.path, section):
            # the key belongs to the plugin that the spec names
            problem = replace(problem, fix=f"use --set {_setting(section, value)}, which replaces the whole section")
    return replace(problem, source=" ".join(f"--set {_setting(path, value)}" for path, value in causes.items()))


def with_known_keys(problems: Sequence[Problem], tables: Mapping[str, Any], registry: Registry) -> list[Problem]:
    """Add to problems of unknown keys which keys of other sections have that name: `lambda` is `method.lambda`."""
    if all(problem.code != "unknown_key" for problem in problems):
        return list(problems)
    by_name: dict[str, list[str]] = {}
    for path in sorted(_known(tables, registry)):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    return [_with_meant(problem, by_name) if problem.code == "unknown_key" else problem for problem in problems]


def _with_meant(problem: Problem, by_name: Mapping[str, Sequence[str]]) -> Problem:
    key = problem.path.rpartition(".")[2]
    if key not in by_name and "did you mean" not in problem.fix:
        key = next(iter(difflib.get_close_matches(key.lower(), by_name, n=1, cutoff=0.8)), key)
    meant = by_name.get(key, [])
    if not 0 < len(meant) <= MAX_MEANT:
        return problem
    question = f"did you mean {' or '.join(map(json.dumps, meant))}?"
    return replace(problem, fix=f"{question} {problem.fix[problem.fix.find('allowed:') :]}")


def _known(tables: Mapping[str, Any], registry: Registry) -> set[str]:
    """Every key that the spec may have: its sections and their fields."""
    keys = {entry.path for entry in ENTRIES.values()}
    for entry in ENTRIES.values():
        for path, section in sections_at(tables, entry.path):
            if section or not isinstance(entry, GroupsEntry):  # few specs have groups
                keys |= {f"{path}.{field.name}" for field in entry.fields(registry, plugin_name(section))}
            if isinstance(entry, PluginEntry | PluginsEntry):
                keys |= set(_inner_keys(path, section, entry.base.kind, registry))
    return {key for key in keys if not key.endswith(".name")}  # which almost every section has


def _inner_keys(path: str, section: Any, kind: str, registry: Registry) -> Iterator[str]:
    """The keys of the plugins that are parameters of the one that a section names."""
    info = registry.plugins(kind).get(plugin_name(section))
    if info is None or info.error or not isinstance(section, Mapping):
        return
    for key, schema in field_schemas(info.load()).items():
        if inner_kind := plugin_kind(schema):
            for inner_path, inner in sections_at(section, key):
                fields = plugin_fields(registry.plugins(inner_kind).get(plugin_name(inner)))
                yield from (f"{path}.{inner_path}.{field.name}" for field in fields)
                yield from _inner_keys(f"{path}.{inner_path}", inner, inner_kind, registry)


def _setting(path: str, value: Any) -> str:
    try:
        text = value if isinstance(value, str) else toml_value(value)
    except (TypeError, ValueError, RecursionError):  # overrides from Python may be anything
        text = short(value)
    return f"{path}={text if len(text) <= 60 else text[:57] + '…'}"


def _others(overrides: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {other: value for other, value in overrides.items() if other != path}


def _is_within(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")


def _identity(problem: Problem) -> tuple[str, str]:
    return problem.path, problem.what
