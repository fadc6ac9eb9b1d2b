"""The columns of a table: which are features, which are ignored, and which must not become features unasked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ensemblekit import DataError
from ensemblekit_datasets.columns import Columns
from ensemblekit_datasets.dates import ADVICE, are_dates
from ensemblekit_datasets.encoding import Category, Encoder, ignore_setting

MANY_CATEGORIES = 50
"""More categories than this are questionable if they are more than a fifth of the rows."""
NEARLY_ALL = 0.9
"""Share of different values from which a column of more than 20 rows looks like names of the rows."""
ALWAYS_MANY = 1_000
SHOWN_COLUMNS = 20
"""Columns that the plan lists one by one."""
_NO_FEATURES = {
    "ignored": "ignored",
    "weight": "weight of the row, no feature",
    "group": "group of the row, no feature",
}


@dataclass(frozen=True)
class ColumnSummary:
    """What was done with a column, as the plan and the run's metadata say."""

    name: str
    role: str
    kind: str
    missing: int
    categories: int | None = None

    @property
    def text(self) -> str:
        """A description in words."""
        if self.role in _NO_FEATURES:
            return _NO_FEATURES[self.role]
        many = (
            "" if self.categories is None else f", {self.categories} {'classes' if self.role == 'target' else 'values'}"
        )
        gaps = f", {self.missing:,} missing" if self.missing else ""
        return f"{'target, ' if self.role == 'target' else ''}{self.kind}{many}{gaps}"


def check_categories(
    columns: Columns,
    undeclared: Iterable[str],
    max_categories: int | None,
    ignored: Iterable[str] = (),
    dates_allowed: bool = False,
) -> None:
    """Ask about columns of dates, and of text that looks like names of the rows, all at once.

    Args:
        columns: The columns of the training file.
        undeclared: Features whose kind the spec does not give.
        max_categories: Largest number of categories; None: a rule that depends on the number of rows.
        ignored: Columns that the spec ignores already.
        dates_allowed: Whether dates are categories like others, as in runs of version 0.1.0.

    Raises:
        DataError: Such columns would become one input per value.
    """
    found, has_dates = {}, False
    for name in undeclared:
        values = (
            [value for value in columns.by_name[name] if value is not None] if columns.kinds[name] == "text" else []
        )
        if not dates_allowed and (name in columns.dates or are_dates(values)):
            count = len(set(values))
            has_dates, found[name] = True, f"dates or times, {count:,} value{'s' * (count != 1)}"
        elif reason := _reason(values, max_categories):
            found[name] = reason
    if found:
        names = list(found)
        listed = "; ".join(f'"{name}" ({reason})' for name, reason in list(found.items())[:SHOWN_COLUMNS])
        ignore = ignore_setting(ignored, names[:SHOWN_COLUMNS])
        fix = f'set {ignore}, or data.columns = {{ "{names[0]}" = "category" }} for one input per value'
        fix = f"{ADVICE}; or {fix}" if has_dates else fix
        raise DataError(f"columns that would become one input per value: {listed}", columns.source, fix)


def _reason(values: list[str], max_categories: int | None) -> str:
    different = len(set(values))
    if max_categories is not None:
        return f"{different:,} values" if different > max_categories else ""
    is_many = (
        different > ALWAYS_MANY
        or (different > MANY_CATEGORIES and different > len(values) / 5)
        or (different > 20 and different > NEARLY_ALL * len(values))
    )
    return f"{different:,} values in {len(values):,} rows" if is_many else ""


def summaries(
    order: Iterable[str],
    columns: Columns,
    encoder: Encoder,
    targets: Iterable[str],
    classes: tuple[str, ...] | None,
    others: Mapping[str, str] | None = None,
) -> list[ColumnSummary]:
    """Describe every column of the training file, in its order.

    Args:
        order: All columns.
        columns: Those that are used.
        encoder: The encoding of the features.
        targets: The columns to predict.
        classes: The names of the classes, if the target is one.
        others: Columns that are neither features nor targets, by name, with their roles: "weight" or "group".
    """
    features = {feature.name: feature for feature in encoder.features}
    goals = set(targets)
    result = []
    for name in order:
        if name in goals:
            kind, count = ("number", None) if classes is None else ("category", len(classes))
            result.append(ColumnSummary(name, "target", kind, 0, count))
        elif (feature := features.get(name)) is not None:
            count = len(feature.categories) if isinstance(feature, Category) else None
            kind = "number" if count is None else "category"
            result.append(ColumnSummary(name, "feature", kind, columns.num_missing(name), count))
        elif (role := (others or {}).get(name)) is not None:
            result.append(ColumnSummary(name, role, "number" if role == "weight" else "category", 0))
        else:
            result.append(ColumnSummary(name, "ignored", "", 0))
    return result


def plan_rows(described: list[ColumnSummary], num_features: int) -> tuple[tuple[str, str], ...]:
    """The rows of the plan about columns: an overview, then one row for each of the first columns."""
    count = {kind: sum(c.role == "feature" and c.kind == kind for c in described) for kind in ("number", "category")}
    ignored = sum(column.role == "ignored" for column in described)
    kinds = f"{count['number']} of numbers, {count['category']} of categories, {ignored} ignored"
    overview = f"{kinds}; together {num_features} input{'s' * (num_features != 1)}"
    rows = [("columns", overview)]
    rows += [(f"  {_short(column.name)}", column.text) for column in described[:SHOWN_COLUMNS]]
    if len(described) > SHOWN_COLUMNS:
        rows.append(("  …", f"{len(described) - SHOWN_COLUMNS:,} more; model.json lists all of them"))
    return tuple(rows)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
