"""Specs and registries that contain Python objects: plugin classes, networks and data in place of names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import UsageError
from ensemblekit.core.plugin import Model, Plugin
from ensemblekit.core.registry import Registry, discover
from ensemblekit.data.arrays import frames_of, is_frame
from ensemblekit.data.in_memory import InMemoryData, python_dataset
from ensemblekit.data.loading import Data, load_data
from ensemblekit.members.python_model import NetworkLike, model_table, with_model
from ensemblekit.spec import reader
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.sections import Spec
from ensemblekit.spec.tables import read_toml

FRAME_DATASET = "table"
"""The data set of a spec that names none, if a frame is passed in Python."""
PluginLike = str | Path | type[Plugin]
"""A local Python file, or a plugin class."""


def spec_of(
    source: Spec | str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    registry: Registry,
    model: NetworkLike | None,
    in_memory: bool,
    data: Any = None,
) -> Spec:
    """Read a spec, with a model from Python in place of its own, if there is one.

    Args:
        source: the spec, or what it is read from.
        overrides: values by dotted path.
        registry: the plugins that it may name.
        model: a model from Python.
        in_memory: whether data is passed in Python; a spec that names no data set is then for such data.
        data: the data, if it is there already.
    """
    table = None if model is None else model_table(model, registry)
    if not isinstance(source, Spec):
        changes = {} if table is None else {"model": table}
        changes |= overrides or {}
        names = {"data": _dataset_for(source, changes, data)} if in_memory else {}
        return reader.load_spec(source, changes, registry, default_names=names, in_memory=in_memory)
    if table is None:
        return source
    if source.has_groups:
        raise UsageError("the groups of the spec have models of their own", "model", "leave out ensemble.groups")
    return replace(source, model=build_plugin(Model, table, registry))


def _dataset_for(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any], data: Any) -> str:
    """Return the name of the data set for data passed in Python: that of tables, if the spec names a target column.

    A single frame without a target is for it too, which asks for one; two frames without it are inputs and targets.
    """
    written = (source if isinstance(source, Mapping) else read_toml(Path(source))).get("data")
    names_target = "data.target" in overrides or (isinstance(written, Mapping) and "target" in written)
    is_table = is_frame(data) or (names_target and (data is None or frames_of(data) is not None))
    return FRAME_DATASET if is_table else InMemoryData().name


def with_data(spec: Spec, data: Any) -> tuple[Spec, Data | None]:
    """Replace the data set of a spec by data from Python, if there is any."""
    if data is None:
        return spec, None
    dataset = python_dataset(spec.data, data)
    return replace(spec, data=dataset), load_data(dataset, spec.seed)


def registry_of(plugins: Iterable[PluginLike] = (), model: NetworkLike | None = None) -> Registry:
    """Return the registry of the installed plugins, those of local files and those passed in Python."""
    plugins = [plugins] if isinstance(plugins, str | Path | type) else list(plugins)
    for plugin in plugins:
        if not isinstance(plugin, str | Path | type):
            what = f"expected a plugin class or the path of a file, got a {type(plugin).__name__}"
            raise UsageError(what, "plugins", "pass the class itself; its parameters belong into the spec")
    files = [plugin for plugin in plugins if isinstance(plugin, str | Path)]
    classes = [plugin for plugin in plugins if not isinstance(plugin, str | Path)]
    registry = _registry_of_files(files).with_classes(classes)
    return registry if model is None else with_model(registry, model)


def _registry_of_files(files: Iterable[str | Path]) -> Registry:
    """Return the registry of the installed plugins and those of local files; a file is executed once per version."""
    versions = tuple((str(file), Path(file).stat().st_mtime_ns if Path(file).exists() else 0) for file in files)
    return _discovered(tuple(sys.path), versions)


@cache
def _discovered(search_path: tuple[str, ...], versions: tuple[tuple[str, int], ...]) -> Registry:
    return discover(file for file, _ in versions)
