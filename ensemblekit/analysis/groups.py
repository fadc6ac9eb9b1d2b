"""Groups of runs by what differs between their specs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ensemblekit.core.errors import UsageError, choices, did_you_mean

FlatSpec = Mapping[str, Any]
"""The plain values of a spec by dotted path."""

ABSENT = None
"""The value of a key that a spec does not have."""
IGNORED_SECTIONS = ("seed", "engine", "sweep", "extensions")
IGNORED_KEYS = ("training.checkpoint_every_minutes", "training.keep_outputs", "data.storage", "data.download")
"""Settings that change how or where a run is computed, not what is trained."""
LOCATIONS = ("path", "root", "test_path")
"""Keys below [data] that say where the data is: whether it is the same data is seen from the data."""


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the plain values of tables by dotted path; entries of a list of tables are numbered from 0."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[str, Any]] = value.items()
    elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        items = ((str(index), item) for index, item in enumerate(value))
    else:
        return {path: list(value) if isinstance(value, tuple) else value}
    found: dict[str, Any] = {}
    for name, item in items:
        found |= flatten(item, f"{path}.{name}" if path else str(name))
    return found


def differing_keys(specs: Sequence[FlatSpec]) -> list[str]:
    """Return the keys whose values differ between specs, without those that do not change what is trained.

    A key that only some plugins have, with one value wherever it is, says no more than the plugin's name.
    """
    keys = dict.fromkeys(key for spec in specs for key in spec if not _is_ignored(key))
    differing = [key for key in keys if len({repr(spec.get(key)) for spec in specs}) > 1]
    plugins = {key.rpartition(".")[0] for key in differing if key.endswith(".name")}
    return [key for key in differing if not (_section(key) in plugins and _is_constant(key, specs))]


def _section(key: str) -> str:
    """The section of a key other than a name."""
    section, _, last = key.rpartition(".")
    return "" if last == "name" else section


def _is_constant(key: str, specs: Sequence[FlatSpec]) -> bool:
    return len({repr(spec[key]) for spec in specs if key in spec}) == 1


def _is_ignored(key: str) -> bool:
    section, _, rest = key.partition(".")
    if section in IGNORED_SECTIONS or key in IGNORED_KEYS:
        return True
    return section == "data" and rest.rpartition(".")[2] in LOCATIONS


def check_keys(keys: Iterable[str], specs: Sequence[FlatSpec], where: str) -> None:
    """Raise a `UsageError` for a key that no spec has."""
    known = sorted({key for spec in specs for key in spec})
    for key in keys:
        if key not in known:
            near = did_you_mean(key, known)
            same_section = [name for name in known if name.partition(".")[0] == key.partition(".")[0]]
            fix = near or choices(key, same_section or differing_keys(specs))
            raise UsageError(f'no run has the key "{key}"', where, fix)


def group_runs(specs: Sequence[FlatSpec], keys: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """Return for each combination of values of the keys these values and the indices of its runs, sorted by value."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for index, spec in enumerate(specs):
        values = {key: spec.get(key, ABSENT) for key in keys}
        groups.setdefault(repr(values), (values, []))[1].append(index)
    return sorted(groups.values(), key=lambda group: [_order(value) for value in group[0].values()])


def _order(value: Any) -> tuple[int, float, str]:
    """Sort numbers by size, then lists of numbers and texts, then what is absent."""
    if value is ABSENT:
        return 2, 0.0, ""
    if isinstance(value, int | float):
        return 0, float(value), ""
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return 1, float(sum(value)), str(value)
    return 1, 0.0, str(value)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a short name for each key: its last part, or as many parts as it takes to tell it from the others."""
    short = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            others = [".".join(other.split(".")[-count:]) for other in keys if other != key]
            if name not in others:
                break
        short[key] = name
    return short


def usual_values(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that more than two thirds of the groups share, such as the epochs of all but one method.

    Models, methods and data are never usual: they tell what is compared.
    """
    found = {}
    for key in groups[0]:
        if key.partition(".")[0] not in ("model", "method", "data"):
            value, count = Counter(repr(group.get(key)) for group in groups).most_common(1)[0]
            if 3 * count > 2 * len(groups):
                found[key] = next(group.get(key) for group in groups if repr(group.get(key)) == value)
    return found


def label_of(values: Mapping[str, Any], names: Mapping[str, str], usual: Mapping[str, Any] | None = None) -> str:
    """Describe a group: `gncl, lambda=0.5, width=32`; names of plugins stand for themselves, without usual values."""
    parts = []
    for key, value in values.items():
        if value is ABSENT or (usual and key in usual and usual[key] == value):
            continue
        is_plugin = key.rpartition(".")[2] == "name" or key in ("method", "model", "data", "training.loss")
        parts.append(text_of(value) if is_plugin else f"{names[key]}={text_of(value)}")
    if not parts and usual:
        return label_of(values, names)
    return ", ".join(parts) or "all runs"


def text_of(value: Any) -> str:
    """Write a value of a spec."""
    if value is ABSENT:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return "[" + ", ".join(text_of(item) for item in value) + "]"
    return str(value)
