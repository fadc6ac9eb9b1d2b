"""The plan of a sweep: a spec and its section [sweep] become validated specs, one for each run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from ensemblekit.analysis.grids import PlannedRun, combinations, conflicts, with_names
from ensemblekit.core.errors import Problem, SpecError, UsageError
from ensemblekit.core.registry import Registry
from ensemblekit.spec.entries import MISSING
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.reading import Reader
from ensemblekit.spec.sections import ENTRIES, Spec
from ensemblekit.spec.sweep import SweepSection
from ensemblekit.spec.tables import override, read_toml

Tables = dict[str, Any]


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep runs: validated specs by the names of their runs."""

    tables: Tables
    """The spec that all runs share, as written, without its section [sweep]."""
    section: SweepSection
    runs: tuple[PlannedRun, ...]
    specs: Mapping[str, Spec]
    """The spec of each run by its name."""
    notes: tuple[str, ...] = ()
    """What a user should know, such as duplicates that were removed."""


def base_tables(source: Spec | str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Tables:
    """Read the tables of a spec without validating them, and apply overrides.

    Args:
        source: a validated spec, the path of a TOML file, or tables.
        overrides: values by dotted path.
    """
    if isinstance(source, Spec):
        tables = source.to_dict()
    else:
        tables = deepcopy(dict(source)) if isinstance(source, Mapping) else read_toml(Path(source))
    problems = []
    for path, value in (overrides or {}).items():
        try:
            override(tables, path, deepcopy(value))
        except UsageError as error:
            problems.append(Problem(error.where, error.what, error.fix))
    if problems:
        raise SpecError(problems, label_of(source))
    return tables


def label_of(source: object) -> str:
    """Name a spec in errors."""
    return str(source) if isinstance(source, str | Path) else "the spec"


def add_to_section(
    tables: Tables,
    grid: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    variants: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Change the section [sweep] of a spec in place: add or replace keys of the grid, replace seeds and variants."""
    section = tables.setdefault("sweep", {})
    if not isinstance(section, dict):
        return  # reported when it is validated
    if grid:
        before = section.get("grid") or {}
        section["grid"] = {**before, **{key: plain_values(values) for key, values in grid.items()}}
    if seeds is not None:
        section["seeds"] = seeds
    if variants is not None:
        section["variants"] = [dict(variant) for variant in variants]


def plain_values(values: Any) -> Any:
    """Return the values of a grid from Python as TOML has them: arrays and ranges become lists."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        return values
    return [value.item() if hasattr(value, "item") else value for value in values]


def make_plan(
    tables: Tables, registry: Registry, label: str = "the spec", known: Mapping[str, str] | None = None
) -> SweepPlan:
    """Validate every combination of a sweep before anything runs.

    Args:
        tables: the spec with its section [sweep], as `base_tables` returns it.
        registry: the plugins that the spec may name.
        label: what to call the spec in errors.
        known: names of runs that exist already, by their identity.

    Raises:
        SpecError: with every problem of every combination.
    """
    _check_toml(tables)
    section, first_seed = read_section(tables, registry, label)
    base = {key: value for key, value in tables.items() if key != "sweep"}
    data = base.get("data")
    decides = data is None or (isinstance(data, Mapping) and "split_seed" in data)
    planned = with_names(combinations(section, first_seed, None if decides else first_seed), known)
    specs = validated_specs(base, planned, registry, label)
    kept, notes = _without_duplicates(planned, specs)
    return SweepPlan(base, section, tuple(kept), {run.name: specs[run.name] for run in kept}, tuple(notes))


def validated_specs(base: Tables, runs: Sequence[PlannedRun], registry: Registry, label: str) -> dict[str, Spec]:
    """Load the spec of each run, by name; a `SpecError` lists each problem once, with the runs that have it."""
    specs: dict[str, Spec] = {}
    found: dict[Problem, list[str]] = {}
    for run in runs:
        try:
            specs[run.name] = load_spec(base, deepcopy(run.all_overrides), registry)
        except SpecError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(run.name)
    if found:
        raise SpecError([_named(problem, names, len(runs)) for problem, names in found.items()], label)
    return specs


def _named(problem: Problem, names: Sequence[str], count: int) -> Problem:
    """Add to a problem which combinations have it."""
    if count == 1:
        return problem
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    where = "all runs" if len(names) == count else f"{names[0]}{others}"
    return Problem(problem.path, f"{problem.what} (in {where})", problem.fix, problem.code)


def read_section(tables: Tables, registry: Registry, label: str) -> tuple[SweepSection, int]:
    """Read the section [sweep] of a spec, empty if it has none, and the first seed."""
    reader = Reader(registry)
    reader.tables = tables
    section = ENTRIES["sweep"].read(reader, tables.get("sweep", MISSING))
    first_seed = ENTRIES["seed"].read(reader, tables.get("seed", MISSING))
    if section is not None:
        reader.problems += conflicts(section)
    if reader.problems:
        raise SpecError(reader.problems, label)
    return section or SweepSection(), first_seed


def _check_toml(tables: Tables) -> None:
    try:
        tomli_w.dumps(tables)
    except (TypeError, ValueError) as error:
        fix = "use strings, numbers, booleans, lists and tables"
        raise UsageError(f"the spec cannot be written as TOML: {error}", "the spec", fix) from error


def _without_duplicates(runs: Sequence[PlannedRun], specs: Mapping[str, Spec]) -> tuple[list[PlannedRun], list[str]]:
    """Drop runs whose spec is equal to that of an earlier one, and say so."""
    first: dict[str, PlannedRun] = {}
    notes = []
    for run in runs:
        key = json.dumps(specs[run.name].to_dict(), sort_keys=True, default=str)
        same = first.setdefault(key, run)
        if same is not run:
            notes.append(f"{run.name} is left out: it is the same as {same.name}")
    return list(first.values()), notes
