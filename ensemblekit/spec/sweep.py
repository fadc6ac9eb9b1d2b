"""The section [sweep] of a spec: a grid of values, a number of seeds and named variants; `train` ignores it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic import Field, field_validator, model_validator

from ensemblekit.core.plugin import Section

MAX_RANGE = 10_000
"""The largest number of values of a range; more are a mistake."""
_OWN_KEYS = ("seed", "sweep")


def _grid_schema(schema: dict[str, Any]) -> None:
    """Describe what `read_grid` accepts: lists and ranges, by dotted path or in nested tables."""
    tables = schema.get("anyOf", [schema])
    for table in tables:
        if table.get("type") == "object":
            table["additionalProperties"] = {"type": ["array", "string", "object"], "minItems": 1}


class VariantSection(Section):
    """A named set of overrides of the spec: another method, a single network …"""

    name: str = Field(min_length=1, max_length=60, description="name of the variant, in names of runs and in tables")
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="overrides by dotted path; a table with a name, or the name alone, replaces the whole table",
    )
    grid: bool | dict[str, list[Any]] = Field(
        True,
        description="true: the sweep's grid, without keys that `set` replaces; false: no grid; or a grid of its own",
        json_schema_extra=_grid_schema,
    )

    @field_validator("set", mode="before")
    @classmethod
    def _flatten_set(cls, value: Any) -> Any:
        paths = dict(_paths(value, "")) if isinstance(value, Mapping) else value
        _refuse_own_keys(paths)
        return paths

    @field_validator("grid", mode="before")
    @classmethod
    def _read_grid(cls, value: Any) -> Any:
        return read_grid(value) if isinstance(value, Mapping) else value


class SweepSection(Section):
    """Which runs a sweep has: variants × grid × seeds."""

    grid: dict[str, list[Any]] = Field(
        default_factory=dict,
        description='values by dotted path: a list, or a range such as "0:1:0.1"',
        json_schema_extra=_grid_schema,
    )
    seeds: int = Field(1, ge=1, le=10_000, description="runs of each combination, with seeds seed, seed + 1 …")
    variants: tuple[VariantSection, ...] = Field(
        (), description="named sets of overrides; without any, the spec itself"
    )

    @field_validator("grid", mode="before")
    @classmethod
    def _read_grid(cls, value: Any) -> Any:
        return read_grid(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check_names(self) -> SweepSection:
        names = [variant.name for variant in self.variants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two variants are called "{name}"')
        return self


def read_grid(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each dotted path; ranges are expanded.

    Raises:
        ValueError: a key has no values, or a range is wrong.
    """
    values = dict(_lists(grid, ""))
    _refuse_own_keys(values)
    return values


def range_values(text: str) -> list[Any] | None:
    """Return the numbers of a range `FIRST:LAST:STEP`, the last included; None if the text is not a range.

    The arithmetic is decimal, so that 0:1:0.1 has 0.3 and not 0.30000000000000004.
    """
    parts = text.split(":")
    try:
        first, last, step = (Decimal(part.strip()) for part in parts)
    except (InvalidOperation, ValueError):
        return None
    if not all(number.is_finite() for number in (first, last, step)) or step == 0 or (last - first) / step < 0:
        raise ValueError(f'the range "{text}" has no values: write FIRST:LAST:STEP, such as 0:1:0.1')
    count = math.floor((last - first) / step) + 1
    if count > MAX_RANGE:
        raise ValueError(f'the range "{text}" has {count:,} values; at most {MAX_RANGE:,} are possible')
    numbers = [first + index * step for index in range(count)]
    if all(part.strip().lstrip("+-").isdigit() for part in parts):
        return [int(number) for number in numbers]
    return [float(number) for number in numbers]


def _lists(grid: Any, prefix: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted path and the values of each key; tables are paths, as `method.lambda = […]` in TOML."""
    for key, value in grid.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _lists(value, f"{path}.")
            continue
        values = range_values(value) if isinstance(value, str) else value
        if not isinstance(values, list):
            raise ValueError(f'"{path}" is neither a list of values nor a range such as "0:1:0.1"')
        if not values:
            raise ValueError(f'"{path}" has no values')
        yield path, values


def _paths(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield overrides by dotted path; a table with a name stands for itself, any other one for the keys in it."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value and "name" not in value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _refuse_own_keys(paths: Any) -> None:
    for path in paths if isinstance(paths, Mapping) else ():
        if path.partition(".")[0] in _OWN_KEYS:
            raise ValueError(f'"{path}" cannot vary here: seeds = N gives each combination the same N seeds')
