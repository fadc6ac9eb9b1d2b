"""A comparison of runs: a row for each group of runs that differ only by their seed, with intervals of differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ensemblekit.analysis.bootstrap import (
    RESAMPLES,
    Interval,
    SampleStatistic,
    difference_interval,
    resampled,
)
from ensemblekit.analysis.groups import (
    FlatSpec,
    check_keys,
    differing_keys,
    group_runs,
    label_of,
    short_names,
    usual_values,
)
from ensemblekit.analysis.measures import MEASURES
from ensemblekit.analysis.seed_noise import PooledVariance, difference_deviations

if TYPE_CHECKING:
    from ensemblekit.analysis.advice import Advice
    from ensemblekit.analysis.budget import Choice

Mark = Literal["best", "within noise"]
NOT_SHOWN = ("loss",)
"""Measures that have no column of their own; figures can show them."""


@dataclass(frozen=True)
class RunFacts:
    """What a comparison keeps of a run: values, and quantities of each test sample, but no outputs."""

    path: Path
    seed: int
    spec: FlatSpec
    values: Mapping[str, float]
    """Measures by name."""
    statistics: Mapping[str, SampleStatistic]
    """Those of them that are statistics of the test samples."""
    directions: Mapping[str, bool | None] = field(default_factory=dict)
    """For each metric of a plugin, whether higher is better."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Final metrics on the validation data."""


@dataclass(frozen=True)
class Cell:
    """A measure of a group of runs."""

    values: tuple[float, ...]
    """The value of each run."""
    difference: float = 0.0
    """The mean minus that of the best group; of the first group if neither high nor low is better."""
    interval: Interval | None = None
    """95 % interval of the difference; None if nothing is known about its noise, or in the best group itself."""
    mark: Mark | None = None
    """Whether the group is the best beyond noise, or not distinguishable from the best."""
    is_leading: bool = False
    """Whether no other group has a better mean, noise or not."""

    @property
    def mean(self) -> float:
        """The mean over the runs."""
        return sum(self.values) / len(self.values)

    @property
    def std(self) -> float | None:
        """The standard deviation over the runs, with the divisor n - 1; None for a single run."""
        return float(torch.tensor(self.values, dtype=torch.float64).std()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Group:
    """Runs that differ only by their seed, or in what a user chose to average over."""

    label: str
    keys: Mapping[str, Any]
    """The values that tell it from the other groups; None for a key that its spec does not have."""
    runs: tuple[RunFacts, ...]
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """Measures by name."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, compared on the same test samples."""

    groups: tuple[Group, ...]
    keys: tuple[str, ...]
    """The keys of the specs that tell the groups apart."""
    num_samples: int
    """Test samples."""
    notes: tuple[str, ...] = ()
    """Runs that were left out, and why; differences that are averaged over."""
    advice: tuple[Advice, ...] = ()
    """What the numbers say, each sentence with its rule, its figures and its source."""

    @property
    def columns(self) -> list[str]:
        """The measures that at least one group has, in the order of the table."""
        found = {name for group in self.groups for name in group.cells}
        known = [name for name in MEASURES if name in found and name not in NOT_SHOWN]
        return known + sorted(found - MEASURES.keys())

    @property
    def primary(self) -> str:
        """The measure that decides: accuracy, or the squared error."""
        return "accuracy" if "accuracy" in self.columns else "mse"

    @property
    def best(self) -> Group:
        """The group with the best mean of the primary measure, noise or not."""
        return next(group for group in self.groups if group.cells[self.primary].is_leading)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each group.

        Returns:
            Rows with `group`, the differing keys by dotted path, `seeds` (the number of runs), `runs` (their paths),
            and for each measure its mean under its name, `…_std` over the runs, `…_difference` from the best group
            with the 95 % interval `…_low` to `…_high`, and `…_mark`: "best", "within noise" or None. What is not known
            is None.
        """
        return [self._row(group) for group in self.groups]

    def _row(self, group: Group) -> dict[str, Any]:
        row: dict[str, Any] = {"group": group.label, **group.keys, "seeds": len(group.runs)}
        for name in self.columns:
            cell = group.cells.get(name)
            interval = cell.interval if cell else None
            row |= {
                name: cell.mean if cell else None,
                f"{name}_std": cell.std if cell else None,
                f"{name}_difference": cell.difference if cell else None,
                f"{name}_low": interval.low if interval else None,
                f"{name}_high": interval.high if interval else None,
                f"{name}_mark": cell.mark if cell else None,
            }
        return row | {"runs": [str(run.path) for run in group.runs]}

    def best_within(self, limits: Mapping[str, float]) -> Choice:
        """Choose the group with the best validation metric within limits, and say how to make it ready to use.

        Args:
            limits: the largest mean of a measure by its name: {"training_seconds": 20, "milliseconds_per_1000": 50}.

        Returns:
            `.group`, its validation `.metric` and `.value`, and `.commands` that train it again, calibrate it, add
            prediction sets or intervals, and export it.

        Raises:
            UsageError: an unknown measure, no group within the limits, or runs without validation data.
        """
        from ensemblekit.analysis.budget import best_within

        return best_within(self, limits)

    def plot(self, path: str | Path, x: str | None = None, rows: Sequence[str] | None = None) -> Path:
        """Draw the measures against a key of the specs: a column for each base model, a row for each measure.

        Args:
            path: the file to write: .png, .svg or .pdf.
            x: the key on the x axis. Default: `method.lambda`, else the numeric key that differs most.
            rows: names of measures. Default: those of the ensemble, diversity, mean member and training loss.

        Returns:
            The path.

        Raises:
            UsageError: no such key or measure, or another kind of file.
        """
        from ensemblekit.analysis.figures import write_figure

        return write_figure(self, Path(path), x, rows)

    def _repr_html_(self) -> str:
        from ensemblekit.analysis.table_formats import as_html

        return as_html(self)

    def __repr__(self) -> str:
        runs = sum(len(group.runs) for group in self.groups)
        return f"Comparison({len(self.groups)} groups of {runs} runs, {self.num_samples} test samples)"


def compare_facts(
    runs: Sequence[RunFacts],
    by: Sequence[str] = (),
    notes: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare runs on the same test samples.

    Args:
        runs: at least one.
        by: the keys that tell groups apart. Default: all that differ and change what is trained.
        notes: shown with the comparison.
        resamples: the number of resampled test sets.
        seed: determines these.

    Raises:
        UsageError: no run has one of the keys.
    """
    specs = [run.spec for run in runs]
    check_keys(by, specs, "--by")
    differing = differing_keys(specs)
    keys = list(dict.fromkeys(by)) or differing
    of_plugins = sorted({name for run in runs for name in run.directions})
    names, short = [*MEASURES, *of_plugins], short_names(keys)
    members = [
        (values, sorted((runs[index] for index in indices), key=lambda run: run.seed))
        for values, indices in group_runs(specs, keys)
    ]
    cells = _all_cells([group for _, group in members], names, resamples, seed)
    usual = usual_values([values for values, _ in members])
    groups = tuple(
        Group(label_of(values, short, usual), values, tuple(group), own)
        for (values, group), own in zip(members, cells, strict=True)
    )
    averaged = [key for key in differing if by and key not in keys]
    extra = [f"averaged over {', '.join(averaged)}, which also differ"] if averaged else []
    num_samples = len(next(iter(runs[0].statistics.values())).features)
    return Comparison(groups, tuple(keys), num_samples, (*notes, *extra))


def _all_cells(
    groups: Sequence[Sequence[RunFacts]], names: Sequence[str], resamples: int, seed: int
) -> list[dict[str, Cell]]:
    """Compute the cells of each group, with one set of resampled test sets for all."""
    runs = [run for group in groups for run in group]
    common = [name for name in names if all(name in run.values for run in runs)]
    shared = [name for name in common if all(name in run.statistics for run in runs)]
    values = resampled([run.statistics[name] for run in runs for name in shared], resamples, seed)
    by_run = values.view(resamples, len(runs), len(shared))
    cells: list[dict[str, Cell]] = [{} for _ in groups]
    for name in names:
        if name in common:
            draws = _draws(by_run[:, :, shared.index(name)], groups) if name in shared else None
            found = _cells(name, groups, draws, resamples, seed)
        else:  # some runs do not know it
            found = [
                Cell(tuple(run.values[name] for run in group)) if all(name in run.values for run in group) else None
                for group in groups
            ]
        for own, cell in zip(cells, found, strict=True):
            if cell is not None:
                own[name] = cell
    return cells


def _draws(by_run: Tensor, groups: Sequence[Sequence[RunFacts]]) -> Tensor:
    """Average resampled values (R, runs) over the runs of each group: (R, G)."""
    parts = by_run.split([len(group) for group in groups], dim=1)
    return torch.stack([part.mean(dim=1) for part in parts], dim=1)


def _cells(
    name: str, groups: Sequence[Sequence[RunFacts]], draws: Tensor | None, resamples: int, seed: int
) -> list[Cell | None]:
    """Compare a measure between groups; `draws` (R, G) are its values on resampled test sets, if it has any."""
    values = [[run.values[name] for run in group] for group in groups]
    means = [sum(group) / len(group) for group in values]
    higher, is_exact = groups[0][0].directions.get(name, MEASURES[name].higher_is_better), name == "parameters"
    best = 0 if higher is None else means.index(max(means) if higher else min(means))
    same_seeds = _have_same_seeds(groups)
    pooled = PooledVariance.of(values, same_seeds)
    intervals: list[Interval | None] = [None] * len(groups)
    for index in set() if is_exact else set(range(len(groups))) - {best}:
        noise = difference_deviations(values[index], values[best], pooled, same_seeds, resamples, seed)
        if draws is not None:
            sampled = draws[:, index] - draws[:, best]
            noise = sampled if noise is None else sampled + noise
        intervals[index] = None if noise is None else difference_interval(means[index], means[best], noise)
    marks = _exact_marks(means, best) if is_exact else _marks(intervals, best, higher is not None)
    return [
        Cell(tuple(group), mean - means[best], interval, mark, higher is not None and mean == means[best])
        for group, mean, interval, mark in zip(values, means, intervals, marks, strict=True)
    ]


def _have_same_seeds(groups: Sequence[Sequence[RunFacts]]) -> bool:
    """Whether every group has one run for each of the same seeds."""
    seeds = [[run.seed for run in group] for group in groups]
    return len(set(seeds[0])) == len(seeds[0]) and all(own == seeds[0] for own in seeds)


def _marks(intervals: Sequence[Interval | None], best: int, is_ranked: bool) -> list[Mark | None]:
    others = [interval for index, interval in enumerate(intervals) if index != best]
    if not is_ranked or not others or None in others:
        return [None] * len(intervals)
    within = [interval is not None and interval.contains_zero for interval in intervals]
    marks: list[Mark | None] = ["within noise" if noise else None for noise in within]
    marks[best] = "within noise" if any(within) else "best"
    return marks


def _exact_marks(means: Sequence[float], best: int) -> list[Mark | None]:
    """Mark the best of numbers that have no noise; nothing if all are equal."""
    if len(set(means)) == 1:
        return [None] * len(means)
    return ["best" if mean == means[best] else None for mean in means]
