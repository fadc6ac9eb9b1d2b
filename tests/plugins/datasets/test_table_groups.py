"""Rows of one group are never divided between training, validation and test rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest
from ensemblekit_datasets.table import Table
from pydantic import ValidationError

from ensemblekit import DataError, load_data

NUM_ROWS = 400


def frame(**columns: Any) -> pandas.DataFrame:
    random = np.random.default_rng(5)
    patients = random.integers(0, 80, NUM_ROWS)
    rows = {
        "x": random.normal(size=NUM_ROWS),
        "patient": patients,
        "label": np.where(random.random(NUM_ROWS) < 0.3, "ill", "well"),
    }
    return pandas.DataFrame(rows | columns)


def table(data: pandas.DataFrame, **parameters: Any) -> Table:
    return Table(target="label", group="patient", **parameters).with_frames([data])


@pytest.mark.parametrize("as_text", [False, True])
def test_no_group_is_in_two_splits_and_classes_keep_their_shares(as_text):
    data = frame()
    if as_text:
        data["patient"] = data["patient"].map("patient {}".format)
    splits = table(data).load(0)
    assert splits.info.input_shape == (1,)
    patients = {name: set(data["patient"].iloc[rows.numpy()]) for name, rows in splits.indices.items()}
    assert not patients["train"] & patients["validation"]
    assert not patients["train"] & patients["test"]
    assert not patients["validation"] & patients["test"]
    assert sum(map(len, patients.values())) == data["patient"].nunique()
    assert len(splits.test[1]) == pytest.approx(0.2 * NUM_ROWS, abs=10)
    share = float((frame()["label"] == "ill").mean())
    assert float((splits.test[1] == 0).float().mean()) == pytest.approx(share, abs=0.05)


def test_the_groups_of_the_training_rows_are_numbered_and_follow_them():
    data = frame()
    loaded = load_data(table(data, limit_train=50), 0)
    assert loaded.train.groups.shape == (50,)
    pairs = set(zip(loaded.train.groups.tolist(), data["patient"].iloc[loaded.train.indices.numpy()], strict=True))
    assert len(pairs) == len({group for group, _ in pairs}) == len({patient for _, patient in pairs})
    notes, columns = dict(loaded.notes), {column["name"]: column for column in loaded.preparation["columns"]}
    assert notes["  patient"] == "group of the row, no feature"
    assert columns["patient"]["role"] == "group"


def test_new_rows_need_no_group():
    data = frame()
    whole = table(data)
    prepared = whole.prepare_frame(data[["x"]], whole.load(0).preparation)
    assert prepared.inputs.shape == (NUM_ROWS, 1)


def test_rows_without_a_group_and_tables_of_one_group_are_refused():
    with pytest.raises(DataError, match=r'(?s)expected a group, got nothing.*row 7, column "patient"'):
        table(frame(patient=[None if i == 7 else "a" for i in range(NUM_ROWS)])).load(0)
    with pytest.raises(DataError, match="groups are too few"):
        table(frame(patient=1)).load(0)


@pytest.mark.parametrize(
    "other", [{"ignore": ("g",)}, {"columns": {"g": "number"}}, {"categorical": ("g",)}, {"weight": "g"}]
)
def test_a_group_has_no_other_role(other):
    with pytest.raises(ValidationError, match=r'names the (group|weight) "g"'):
        Table(target="label", group="g", **other)
    with pytest.raises(ValidationError, match='names the target "label"'):
        Table(target="label", group="label")
