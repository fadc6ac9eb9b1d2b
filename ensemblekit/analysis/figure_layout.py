"""The layout of a comparison's figure: columns of base models, lines over λ, marks and single networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemblekit.analysis.groups import differing_keys, label_of, short_names, text_of, usual_values

if TYPE_CHECKING:
    from ensemblekit.analysis.comparison import Comparison, Group

LAMBDA = "method.lambda"
MAX_LABEL = 42
"""Longer labels are cut."""
MAX_TICKS = 6
LOGARITHMIC_RATIO = 50
"""Ratio of the largest to the smallest x from which on the axis is logarithmic."""


@dataclass(frozen=True)
class Point:
    """A group at a position of the x axis."""

    position: float
    group: Group
    label: str = ""
    """The name of its slot, if it stands there for itself."""


@dataclass(frozen=True)
class Series:
    """Groups that differ only by x: a line."""

    label: str
    points: list[Point]


@dataclass(frozen=True)
class Column:
    """The groups of one base model."""

    label: str
    series: list[Series]
    marks: list[Point]
    single: list[Group]


@dataclass(frozen=True)
class Layout:
    """All columns and the x axis that they share."""

    columns: list[Column]
    slots: list[str]
    """The names of the positions of marks, to the right of the numbers."""
    series_labels: list[str]
    ticks: list[tuple[float, str]]
    x_title: str
    limits: tuple[float, float]
    number_range: tuple[float, float]
    """The positions of the first and the last number."""
    boundary: float | None
    """Where numbers end and slots begin; None if there are not both."""


def lay_out(comparison: Comparison, x: str | None = None) -> Layout:
    """Find the place of every group.

    Args:
        comparison: the groups.
        x: the key of the x axis. Default: `method.lambda`, else the numeric key that differs most, else none.
    """
    x = x or _default_x(comparison)
    groups = comparison.groups
    model_keys = [key for key in _all_differing(comparison) if key.startswith("model.") and key != x]
    others = [key for key in comparison.keys if key != x and key not in model_keys]
    numbers = sorted({float(value) for group in groups if _is_number(value := _value(group, x))})
    axis = _Axis(numbers)
    single = [group for group in groups if _is_single(group) and x != "ensemble.members"]
    names, usual = short_names(comparison.keys), usual_values([group.keys for group in groups])
    by_label: dict[str, Column] = {}
    slots: dict[str, None] = {}
    for group in groups:
        label = _model_label(group, model_keys)
        column = by_label.setdefault(label, Column(label, [], [], []))
        value = _value(group, x)
        rest = {key: group.keys[key] for key in _telling(others, groups, single)}
        if group in single and len(groups) > 1:
            column.single.append(group)
        elif _is_number(value):
            _add(column, label_of(rest, names, usual), Point(axis.position(float(value)), group))
        else:
            own = label_of(rest, names, usual) if value is None else text_of(value)
            slots.setdefault(own)
            column.marks.append(Point(0.0, group, own))
    columns = [_placed(column, list(slots), axis) for column in by_label.values()]
    return _with_axis(columns, list(slots), axis, x, comparison)


def _add(column: Column, label: str, point: Point) -> None:
    for series in column.series:
        if series.label == label:
            series.points.append(point)
            series.points.sort(key=lambda own: own.position)
            return
    column.series.append(Series(label, [point]))


def _placed(column: Column, slots: Sequence[str], axis: _Axis) -> Column:
    """Return the column with its marks at their slots."""
    marks = [Point(axis.slot(slots.index(mark.label)), mark.group, mark.label) for mark in column.marks]
    return Column(column.label, column.series, marks, column.single)


def _with_axis(columns: list[Column], slots: list[str], axis: _Axis, x: str | None, comparison: Comparison) -> Layout:
    labels = list(dict.fromkeys(series.label for column in columns for series in column.series))
    ticks = axis.ticks() + [(axis.slot(index), label) for index, label in enumerate(slots)]
    last = axis.slot(len(slots) - 1) if slots else axis.end
    margin = 0.6 * axis.step
    boundary = axis.slot(0) - axis.step if slots and axis.numbers else None
    title = "" if not axis.numbers and (x is None or x == LAMBDA) else "λ" if x == LAMBDA else str(x)
    limits, numbers = (axis.start - margin, last + margin), (axis.start, axis.end)
    return Layout(columns, slots, labels, ticks, title, limits, numbers, boundary)


class _Axis:
    """Positions of numbers, linear or logarithmic, followed by slots for names."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = list(numbers)
        self.logarithmic = bool(numbers) and numbers[0] > 0 and numbers[-1] / numbers[0] >= LOGARITHMIC_RATIO
        self.start = self.position(numbers[0]) if numbers else 0.0
        self.end = self.position(numbers[-1]) if numbers else 0.0
        self.step = (self.end - self.start) / 8 or 1.0

    def position(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def slot(self, index: int) -> float:
        return self.end + (2 + index * 1.4) * self.step if self.numbers else float(index)

    def ticks(self) -> list[tuple[float, str]]:
        """Label the numbers, but not more than fit."""
        every = max(1, math.ceil(len(self.numbers) / MAX_TICKS))
        return [(self.position(number), f"{number:g}") for number in self.numbers[::every]]


def _default_x(comparison: Comparison) -> str | None:
    """Return the key that is most worth an axis; None if no number differs."""
    if any(_is_number(_value(group, LAMBDA)) for group in comparison.groups):
        return LAMBDA
    counts = {
        key: len({_value(group, key) for group in comparison.groups if _is_number(_value(group, key))})
        for key in comparison.keys
        if not key.startswith("model.")
    }
    best = max(counts, key=lambda key: counts[key], default=None)
    return best if best is not None and counts[best] > 1 else None


def _telling(keys: Sequence[str], groups: Sequence[Group], single: Sequence[Group]) -> list[str]:
    """Return the keys that tell apart the groups other than single networks."""
    rest = [group for group in groups if group not in single] or list(groups)
    return [key for key in keys if len({repr(group.keys[key]) for group in rest}) > 1]


def _all_differing(comparison: Comparison) -> list[str]:
    return differing_keys([run.spec for group in comparison.groups for run in group.runs])


def _model_label(group: Group, model_keys: Sequence[str]) -> str:
    spec = _spec(group)
    name = text_of(spec.get("model.name", spec.get("model", "")))
    values = {key: spec.get(key) for key in model_keys if key != "model.name"}
    rest = label_of(values, short_names(list(values))) if any(value is not None for value in values.values()) else ""
    return ", ".join(filter(None, (name, rest)))


def _is_single(group: Group) -> bool:
    return _spec(group).get("ensemble.members") == 1


def _value(group: Group, key: str | None) -> Any:
    """Return the value of a key in the spec of a group; None if runs of the group have several."""
    if key is None:
        return None
    values = {repr(run.spec.get(key)) for run in group.runs}
    return _spec(group).get(key) if len(values) == 1 else None


def _spec(group: Group) -> Mapping[str, Any]:
    return group.runs[0].spec


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
