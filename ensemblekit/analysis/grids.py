"""The combinations of a sweep: variants × grid × seeds, as sets of overrides with readable names."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ensemblekit.core.errors import Problem, UsageError
from ensemblekit.core.parameters import toml_value
from ensemblekit.spec.sweep import SweepSection, VariantSection, range_values

MAX_RUNS = 10_000
"""The largest number of runs of a sweep; more are a mistake."""
_MAX_NAME = 150
"""Characters of a run's name: file systems allow 255 bytes."""
SPLIT_SEED = "data.split_seed"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: the spec of the sweep with some overrides, and a seed."""

    variant: str
    """Name of the variant; empty if the sweep has none."""
    overrides: Mapping[str, Any]
    """Values by dotted path, those of the variant first; the seed is not among them."""
    seed: int
    varied: tuple[str, ...] = ()
    """The overrides that the name shows: those of the grid."""
    name: str = ""
    split_seed: int | None = None
    """The seed of the splits that all runs of the sweep share; None if the spec itself decides."""

    @property
    def all_overrides(self) -> dict[str, Any]:
        """The overrides, the seed and that of the splits."""
        shared = self.split_seed is not None and SPLIT_SEED not in self.overrides
        return {**self.overrides, **({SPLIT_SEED: self.split_seed} if shared else {}), "seed": self.seed}

    @property
    def identity(self) -> str:
        """A text that is equal for runs with equal overrides; 0 and 0.0 are equal."""
        return json.dumps([self.variant, _plain(self.overrides), self.seed], sort_keys=True, default=str)


def parse_grid(text: str, option: str = "--grid") -> tuple[str, list[Any]]:
    """Split `a.b=1,2,3` or `a.b=0:1:0.1` into a dotted path and its values; each value is read as TOML."""
    path, equals, values = text.partition("=")
    if not equals or not path.strip():
        raise UsageError(f'expected KEY=V1,V2,…, got "{text}"', option, f"write {option} method.lambda=0,0.5,1")
    items = list(split_values(values))
    if not all(items):
        raise UsageError(f'"{path.strip()}" has an empty list or an empty value', option, "give at least one value")
    try:
        return path.strip(), [value for item in items for value in _values(item)]
    except ValueError as error:
        raise UsageError(str(error), f"{option} {path.strip()}", "close quotes and brackets") from error


def split_values(text: str) -> Iterator[str]:
    """Split at commas that are not inside quotes or brackets."""
    depth, quote, start = 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def _values(item: str) -> list[Any]:
    """Read one item of a grid: a range, a TOML value, or else a string."""
    numbers = range_values(item)
    if numbers is not None:
        return numbers
    try:
        parsed = tomllib.loads(f"value = {item}")
    except (ValueError, RecursionError) as error:
        if item[0] in "[{\"'":
            raise ValueError(f'"{item}" is not a TOML value: {error}') from error
        return [item]
    return [parsed["value"]] if len(parsed) == 1 else [item]


def combinations(section: SweepSection, first_seed: int, split_seed: int | None = None) -> list[PlannedRun]:
    """List the runs of a sweep, without names; the first seed of all combinations comes first.

    Runs with different seeds share their splits, by `split_seed`, so that they can be compared sample by sample.

    Raises:
        UsageError: there are too many runs.
    """
    variants = section.variants or (VariantSection(name="-", grid=True),)
    grids = [(variant, grid_of(variant, section.grid)) for variant in variants]
    count = section.seeds * sum(math.prod(map(len, grid.values())) for _, grid in grids)
    if count > MAX_RUNS:
        raise UsageError(f"{count:,} runs are more than {MAX_RUNS:,}", "the grid", "give fewer values or seeds")
    runs = []
    for seed in range(first_seed, first_seed + section.seeds):
        for variant, grid in grids:
            for values in product(*grid.values()):
                chosen = dict(zip(grid, values, strict=True))
                name = variant.name if section.variants else ""
                overrides = {**variant.set, **chosen}
                runs.append(PlannedRun(name, overrides, seed, tuple(grid), split_seed=split_seed))
    return runs


def grid_of(variant: VariantSection, grid: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the grid of a variant: its own, or the sweep's without what the variant sets or replaces."""
    if isinstance(variant.grid, dict):
        chosen: Mapping[str, list[Any]] = variant.grid
    else:
        chosen = {key: values for key, values in grid.items() if variant.grid and not _is_set(key, variant.set)}
    # a table before the keys in it
    return dict(sorted(chosen.items(), key=lambda item: item[0].count(".")))


def conflicts(section: SweepSection) -> Iterator[Problem]:
    """Yield a problem for each grid key that would replace what a variant sets below it."""
    for index, variant in enumerate(section.variants):
        for key in grid_of(variant, section.grid):
            for path in variant.set:
                if path == key or path.startswith(f"{key}."):
                    what = f'the grid key "{key}" replaces "{path}" of the variant "{variant.name}"'
                    yield Problem(f"sweep.variants.{index}", what, "write grid = false, or a grid of its own")


def _is_set(key: str, overrides: Mapping[str, Any]) -> bool:
    """Whether a variant sets a key, or replaces a table that the key is in."""
    return any(key == path or key.startswith(f"{path}.") for path in overrides)


def with_names(runs: Sequence[PlannedRun], known: Mapping[str, str] | None = None) -> list[PlannedRun]:
    """Give every run a name that is also that of its directory.

    Args:
        runs: the runs.
        known: the names that runs already have, by `PlannedRun.identity`; they keep them.
    """
    known = known or {}
    labels = short_keys({key for run in runs for key in run.varied})
    taken = {name.casefold() for name in known.values()}  # some file systems ignore case
    named = []
    for run in runs:
        name = known.get(run.identity)
        if name is None:
            name = readable_name(run, labels)
            if name.casefold() in taken:
                name += f"-{hashlib.sha256(run.identity.encode()).hexdigest()[:8]}"
            taken.add(name.casefold())
        named.append(replace(run, name=name))
    return named


def readable_name(run: PlannedRun, labels: Mapping[str, str]) -> str:
    """Return a name such as `bagging,lambda=0.5,seed=1`, of characters that every file system allows."""
    parts = [_safe(run.variant)] if run.variant else []
    parts += [f"{_safe(labels[key])}={_safe(_value_text(run.overrides[key]))}" for key in run.varied]
    text, end = ",".join(parts), f"seed={run.seed}"
    if len(text) > _MAX_NAME:
        text = f"{text[:_MAX_NAME]}-{hashlib.sha256(run.identity.encode()).hexdigest()[:8]}"
    return f"{text},{end}" if text else end


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Shorten dotted paths to as many of their last parts as tell them apart."""
    keys = sorted(keys)
    labels = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        free = (end for end in endings if not any(other == end or other.endswith(f".{end}") for other in others))
        labels[key] = next(free, key)
    return labels


def cell(value: Any) -> str:
    """Write a value for a table: text as it is, anything else as TOML."""
    return value if isinstance(value, str) else inline_toml(value)


def inline_toml(value: Any) -> str:
    """Write a value as TOML on one line, tables too."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {inline_toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline_toml(item) for item in value)}]"
    return toml_value(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, flags=re.ASCII) else toml_value(key)


def _value_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, Mapping):
        return "-".join(_value_text(item) for item in value.values())
    if isinstance(value, list | tuple):
        return "-".join(map(_value_text, value))
    return cell(value)


def _safe(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", text, flags=re.ASCII)


def _plain(value: Any) -> Any:
    """Return a value in which integral floats are integers, as 1.0 and 1 mean the same in a grid."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
