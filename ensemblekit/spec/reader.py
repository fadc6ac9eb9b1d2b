"""Reads a spec: reports every problem at once, each with its dotted path and what is allowed.

A spec can only name plugins that are installed or that a person passed on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import Problem, SpecError, UsageError, choices
from ensemblekit.core.registry import Registry
from ensemblekit.spec.checks import spec_problems
from ensemblekit.spec.entries import MISSING
from ensemblekit.spec.hints import attribute, with_known_keys
from ensemblekit.spec.reading import AnyPlugin, Reader
from ensemblekit.spec.sections import ENTRIES, Spec
from ensemblekit.spec.tables import override, read_toml


def load_spec(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    registry: Registry,
    ask_plugins: bool = True,
    default_names: Mapping[str, str] | None = None,
    for_training: bool = True,
    in_memory: bool = False,
) -> Spec:
    """Read and validate a spec.

    Args:
        source: path of a TOML file, or its content as a mapping.
        overrides: values by dotted path.
        registry: the plugins that the spec may name.
        ask_plugins: whether plugins check the spec; not for that of a run, which an older version may have accepted.
        default_names: plugins for sections that the spec leaves out, or that have no name.
        for_training: whether it is going to be trained; if not, parts that only training needs may be `Unavailable`.
        in_memory: whether data is passed in Python, so that the data set needs no files.

    Raises:
        SpecError: with all problems of the spec.
    """
    label = "the spec" if isinstance(source, Mapping) else str(source)
    tables = source if isinstance(source, Mapping) else read_toml(Path(source))
    overrides = dict(overrides or {})
    spec, reader = _attempt(tables, overrides, registry, ask_plugins, default_names or {}, for_training, in_memory)
    if spec is None or reader.problems:
        problems = with_known_keys(reader.problems, reader.tables, registry)
        if overrides:
            without = partial(
                _attempt,
                tables,
                registry=registry,
                ask_plugins=ask_plugins,
                default_names=default_names or {},
                in_memory=in_memory,
            )
            problems = attribute(problems, overrides, lambda others: without(others)[1].problems)
        raise SpecError(problems, label)
    return spec


def _attempt(
    tables: Mapping[str, Any],
    overrides: Mapping[str, Any],
    registry: Registry,
    ask_plugins: bool,
    default_names: Mapping[str, str],
    for_training: bool = True,
    in_memory: bool = False,
) -> tuple[Spec | None, Reader]:
    """Read a spec with overrides, and return it with its reader, which has the problems; `tables` stay as they are."""
    changed = dict(deepcopy(tables))
    reader = Reader(registry)
    for path, value in overrides.items():
        try:
            override(changed, path, deepcopy(value))
        except UsageError as error:
            reader.problem(error.where, error.what, error.fix)
    for section, name in default_names.items():
        table = changed.setdefault(section, {})
        if isinstance(table, dict):
            table.setdefault("name", name)
    spec = _read(reader, changed, for_training)
    if spec is not None and ask_plugins:
        reader.problems += spec_problems(spec, in_memory)
    return spec, reader


def build_plugin(base: type[AnyPlugin], value: str | Mapping[str, Any], registry: Registry) -> AnyPlugin:
    """Build one plugin from its table, or from its name alone."""
    reader = Reader(registry)
    plugin = reader.plugin(base, value, base.kind)
    if plugin is None:
        raise SpecError(reader.problems, f"the {base.kind}")
    return plugin


def _read(reader: Reader, tables: dict[str, Any], for_training: bool) -> Spec | None:
    reader.tables = tables
    allowed = {entry.path.partition(".")[0] for entry in ENTRIES.values()}
    for key in tables:
        if key not in allowed:
            reader.problems.append(Problem(str(key), "unknown key", choices(str(key), allowed), "unknown_key"))
    for name, entry in ENTRIES.items():
        value, known = _value_at(tables, entry.path), len(reader.problems)
        reader.values[name] = entry.read(reader, value)
        if entry.only_training and not for_training and value is not MISSING and len(reader.problems) > known:
            del reader.problems[known:]
            reader.values[name] = entry.unavailable(value)
    if reader.problems:
        return None
    has_loss = _value_at(tables, "training.loss") is not MISSING
    return Spec(**reader.values, default_loss=None if has_loss else reader.values["loss"])


def _value_at(tables: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; a parent that is not a table is reported by the entry of the parent."""
    value: Any = tables
    for key in path.split("."):
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
    return value
