"""Parameters of estimators: those of a spec, by the same names; parts of tables are reached by `NAME__KEY`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ensemblekit.core.plugin import Plugin

SECTIONS = {
    "ensemble": ("members", "combiner"),
    "training": (
        "epochs",
        "batch_size",
        "loss",
        "optimizer",
        "schedule",
        "mix",
        "clip_norm",
        "patience",
        "keep",
        "evaluate_every",
    ),
}
"""The parameters that are keys of a spec's section."""
TABLES = ("method", "model", "combiner", "loss", "optimizer", "schedule", "mix", "engine")
"""The parameters that are a name or a table."""


def spec_tables(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a spec from the parameters of an estimator; those that are None are left out."""
    tables: dict[str, Any] = {"method": plain(parameters["method"]), "engine": as_table(parameters["engine"])}
    for section, names in SECTIONS.items():
        tables[section] = {name: plain(parameters[name]) for name in names if parameters[name] is not None}
    if isinstance(parameters["model"], str | Mapping):
        tables["model"] = plain(parameters["model"])
    return tables


def plain(value: Any) -> Any:
    """Return a value of a spec without types of numpy, which grids of parameters have."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    return value.to_table() if isinstance(value, Plugin) else value


def as_table(value: Any) -> dict[str, Any]:
    """Return a name as a table, and a table as a copy; None is an empty one.

    Raises:
        ValueError: it is neither.
    """
    found = {} if value is None else {"name": value} if isinstance(value, str) else plain(value)
    if not isinstance(found, dict):
        raise ValueError(f"only a name or a table has parameters, not {value!r:.100}")
    return found


def nested_parameters(name: str, value: Any) -> dict[str, Any]:
    """Return the parameters of a table by `NAME__KEY`, also those of the tables in it."""
    nested: dict[str, Any] = {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            nested |= {f"{name}__{key}": inner, **nested_parameters(f"{name}__{key}", inner)}
    return nested


def with_nested(value: Any, path: str, inner: Any) -> dict[str, Any]:
    """Return a name or table as a table with another value at `KEY`, or at `KEY__KEY` of a table in it."""
    key, _, rest = path.partition("__")
    table = as_table(value)
    return {**table, key: with_nested(table.get(key), rest, inner) if rest else inner}
