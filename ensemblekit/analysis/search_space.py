"""What a search varies: intervals and lists of values by dotted path, parsed and validated before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ensemblekit.analysis.grids import PlannedRun, parse_grid
from ensemblekit.analysis.plans import Tables, plain_values, validated_specs
from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.core.registry import Registry

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    integers: bool = False

    @property
    def ends(self) -> list[float]:
        """The lowest and the highest value."""
        return [int(self.low), int(self.high)] if self.integers else [self.low, self.high]

    def suggest(self, trial: optuna.Trial, key: str) -> Any:
        """Let Optuna choose."""
        if self.integers:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        low, high = self.ends
        return f"{low!r}..{high!r}{':log' if self.log else ''}"


@dataclass(frozen=True)
class Choices:
    """Some values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> list[Any]:
        """All values."""
        return list(self.values)

    def suggest(self, trial: optuna.Trial, key: str) -> Any:
        """Let Optuna choose; by index, since values may be lists or tables."""
        return self.values[trial.suggest_categorical(key, tuple(range(len(self.values))))]

    def __str__(self) -> str:
        return ",".join(map(str, self.values))


Space = Mapping[str, Interval | Choices]


def parse_space(text: str) -> tuple[str, Interval | Choices]:
    """Split `a.b=LOW..HIGH`, `a.b=LOW..HIGH:log` or `a.b=1,2,3` into a dotted path and its values."""
    path, equals, values = text.partition("=")
    path = path.strip()
    if not equals or not path or not values.strip():
        what = f'expected KEY=LOW..HIGH or KEY=V1,V2,…, got "{text}"'
        raise UsageError(what, "--search", "write --search method.lambda=0..1")
    if ".." not in values:
        return path, Choices(tuple(parse_grid(text, "--search")[1]))
    return path, _interval(values.strip(), path)


def _interval(text: str, path: str) -> Interval:
    bounds, _, scale = text.partition(":")
    low, _, high = bounds.partition("..")
    try:
        interval = Interval(float(low), float(high), scale == "log")
    except ValueError:
        raise UsageError(f'"{text}" is not LOW..HIGH', f"--search {path}", "give two numbers, as in 0..1") from None
    ordered = math.isfinite(interval.low) and math.isfinite(interval.high) and interval.low < interval.high
    if not ordered or scale not in ("", "log") or (interval.log and interval.low <= 0):
        fix = "LOW must be less than HIGH, and more than 0 with :log"
        raise UsageError(f'"{text}" is not an interval', f"--search {path}", fix)
    return interval


def read_space(space: Mapping[str, Any]) -> dict[str, Interval | Choices]:
    """Read the space of a search from Python: texts as on the command line, or lists of values."""
    return {
        key: parse_space(f"{key}={value}")[1] if isinstance(value, str) else Choices(tuple(plain_values(value)))
        for key, value in space.items()
    }


def resolved_space(tables: Tables, space: Space, registry: Registry, label: str) -> dict[str, Interval | Choices]:
    """Validate the ends of each interval and each choice; intervals of integers are those that accept no fraction."""
    base = {key: value for key, value in tables.items() if key != "sweep"}
    first = {key: part.ends[0] for key, part in space.items()}
    runs, resolved = [], {}
    for key, part in space.items():
        if isinstance(part, Interval) and part.low.is_integer() and part.high.is_integer():
            part = replace(part, integers=not _accepts(base, {**first, key: part.low + 0.5}, key, registry))
        resolved[key] = part
        for value in part.ends:
            runs.append(PlannedRun("", {**first, key: value}, first_seed(tables), (key,), f"{key}={value}"))
    for index, run in enumerate(runs):
        merged = {key: int(value) if _is_int(resolved.get(key)) else value for key, value in run.overrides.items()}
        runs[index] = replace(run, overrides=merged)
    validated_specs(base, runs, registry, label)
    return resolved


def _is_int(part: Interval | Choices | None) -> bool:
    return isinstance(part, Interval) and part.integers


def _accepts(base: Tables, overrides: Mapping[str, Any], key: str, registry: Registry) -> bool:
    """Whether no problem of a spec with these overrides is about one of them."""
    try:
        validated_specs(base, [PlannedRun("", overrides, 0)], registry, "")
    except SpecError as error:
        return not any(problem.path == key for problem in error.problems)
    return True


def first_seed(tables: Tables) -> int:
    """Return the seed of a spec."""
    seed = tables.get("seed", 0)
    return seed if isinstance(seed, int) else 0
