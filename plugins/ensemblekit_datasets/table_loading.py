"""Loads the splits of a table: reads its files or frames, splits the rows and fits the preparation to training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemblekit import DataError, DataInfo, Splits, generator, hold_out
from ensemblekit_datasets.columns import Columns, NumberFormat, check_exist, typed_columns
from ensemblekit_datasets.encoding import Encoder
from ensemblekit_datasets.frames import raw_frame
from ensemblekit_datasets.table_columns import check_categories, plan_rows, summaries
from ensemblekit_datasets.table_files import RawTable, read_raw
from ensemblekit_datasets.table_preparation import TablePreparation
from ensemblekit_datasets.table_targets import class_names, group_tensor, infer_task, target_tensor, weight_tensor

if TYPE_CHECKING:
    from ensemblekit_datasets.table import Table

FRAMES = {1: ("train",), 2: ("train", "test"), 3: ("train", "validation", "test")}
"""The splits that one, two or three frames stand for."""


def load_table(table: Table, seed: int) -> Splits:
    """Load the splits of a table; see `Dataset.load`."""
    raws = raw_tables(table)
    columns, classes = read_columns(table, raws["train"])
    task = table.known_task or ("classification" if classes else "regression")
    others = table.other_roles
    features = [name for name in columns.by_name if name not in (*table.targets, *others)]
    undeclared = (name for name in features if name not in table.kinds())
    check_categories(columns, undeclared, table.max_categories, table.ignore, table.dates_allowed)
    are_labels = task == "multilabel"
    targets = target_tensor(columns, table.targets, classes, are_labels)
    groups = None if table.group is None else group_tensor(columns, table.group)
    rows = split_rows(table, targets, seed, groups, apart=raws)
    encoder = Encoder.fit(columns, rows["train"], features, table.ignore, table.scaling)
    parts = {name: (encoder(columns, chosen), targets[chosen]) for name, chosen in rows.items()}
    kinds = {name: kind for name, kind in columns.kinds.items() if name not in others}
    for name in raws.keys() - {"train"}:
        other = typed_columns(raws[name], kinds, table.number_format)
        parts[name] = (encoder(other), target_tensor(other, table.targets, classes, are_labels))
    described = summaries(raws["train"].by_name, columns, encoder, table.targets, classes, others)
    preparation = TablePreparation(encoder, table.targets, classes, table.delimiter, table.number_format)
    num_outputs = len(classes) if classes else len(table.targets)
    train = rows["train"]
    return Splits(
        train=parts["train"],
        validation=parts.get("validation"),
        test=parts["test"],
        info=DataInfo(task, (encoder.num_features,), num_outputs, encoder.category_blocks),
        classes=table.targets if are_labels else classes,
        notes=plan_rows(described, encoder.num_features),
        standardise_targets=table.standardise_targets and task == "regression",
        preparation=preparation.to_json(described),
        indices=rows,
        weights=None if table.weight is None else weight_tensor(columns, table.weight)[train],
        groups=None if groups is None else groups[train],
    )


def raw_tables(table: Table) -> dict[str, RawTable]:
    """Read the files or frames of a table, by the splits that they stand for.

    Raises:
        DataError: There are none; one cannot be read.
    """
    if table.frames:
        splits = FRAMES[len(table.frames)]
        return {name: raw_frame(frame, f"{name} frame") for name, frame in zip(splits, table.frames, strict=True)}
    if table.path is None:
        what, where = "the rows of this table were passed in Python", f'data set "{table.name}"'
        fix = "use it from Python with data=…; predict, and evaluate with --data FILE, take files with the same columns"
        raise DataError(what, where, fix, python_fix="pass the frames again: data=frame")
    raws = {"train": read_raw(table.path.absolute(), table.delimiter)}
    if table.test_path is not None:
        raws["test"] = read_raw(table.test_path.absolute(), table.delimiter)
    return raws


def read_columns(table: Table, raw: RawTable) -> tuple[Columns, tuple[str, ...] | None]:
    """Return the columns that are used, and the names of the classes, None for labels and real values."""
    ignored = {*table.ignore, *(name for name, use in table.columns.items() if use == "ignore")}
    given, others, targets = table.kinds(), table.other_roles, table.targets
    check_exist(raw, [*targets, *others, *given, *ignored])
    if set(raw.by_name) <= {*targets, *others, *ignored}:
        raise DataError("expected columns besides the target, got none", raw.source, "add features")
    task = table.known_task or infer_task(raw, targets[0], table.number_format)
    given |= dict.fromkeys(targets, "text" if task == "classification" else "number")
    given |= {name: "number" if role == "weight" else "text" for name, role in others.items()}
    used = {name: given.get(name) for name in raw.by_name if name not in ignored}
    columns = typed_columns(raw, used, table.number_format)
    if task != "classification":
        return columns, None
    return columns, class_names(columns, targets[0], _class_format(table, raw), table.max_classes)


def _class_format(table: Table, raw: RawTable) -> NumberFormat:
    """How the numbers among the names of classes are written: numbers of typed columns have a decimal point."""
    return NumberFormat() if raw.declared.get(table.targets[0]) == "number" else table.number_format


def split_rows(
    table: Table, targets: Tensor, seed: int, groups: Tensor | None = None, apart: dict[str, RawTable] | None = None
) -> dict[str, Tensor]:
    """Split the rows of the training table, except for the splits that are tables of their own."""
    random = generator(seed, "table")
    apart = apart or {}
    split = {"train": torch.arange(len(targets))}
    for name, fraction in (("test", table.test_fraction), ("validation", table.validation_fraction)):
        if name in apart or fraction == 0:
            continue
        rows = split["train"]
        own = None if groups is None else groups[rows]
        kept, held_out = hold_out(targets[rows], fraction, random, own)
        split |= {"train": rows[kept], name: rows[held_out]}
    return split
