"""Data passed in Python: every accepted form gives the same samples, anything else is an error that lists the forms."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from helpers.small_runs import Crash, CrashOnSave
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import ensemblekit as ek
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.data.python_data import split_parts

INPUTS = torch.arange(60, dtype=torch.float32).view(20, 3)
TARGETS = torch.arange(20) % 2
SPEC = {"model": {"name": "mlp", "hidden": [4]}, "training": {"epochs": 1}, "ensemble": {"members": 2}}
SPEC |= {"engine": {"name": "sequential"}}


class Pairs(Dataset):
    """A data set of someone who has only read torch's tutorial."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return INPUTS[index], int(TARGETS[index])


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def frame() -> pandas.DataFrame:
    return pandas.DataFrame(INPUTS.numpy(), columns=["a", "b", "c"])


def loaded(data: Any, seed: int = 0, **parameters: Any) -> ek.Data:
    return ek.load_data(InMemoryData(**parameters).of(*split_parts(data)), seed)


def samples(split: ek.Split) -> list[tuple]:
    batch = next(split.batches(1000))
    return [(*inputs, target) for inputs, target in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)]


FORMS: dict[str, Any] = {
    "tensors": (INPUTS, TARGETS),
    "a list of tensors": [INPUTS, TARGETS],
    "float64": (INPUTS.double(), TARGETS),
    "arrays": (INPUTS.numpy(), TARGETS.numpy()),
    "integer arrays": (INPUTS.numpy().astype(np.int16), TARGETS.numpy().astype(np.uint8)),
    "arrays of another byte order": (INPUTS.numpy().astype(">f8"), TARGETS.numpy().astype(">i4")),
    "an array with negative strides": (INPUTS.numpy()[::-1][::-1], TARGETS.numpy()),
    "objects": (INPUTS.numpy().astype(object), TARGETS.numpy().astype(object)),
    "a column of targets": (INPUTS.numpy(), TARGETS.numpy()[:, None]),
    "booleans": (INPUTS, TARGETS.bool()),
    "lists": (INPUTS.tolist(), TARGETS.tolist()),
    "a frame and a series": (frame(), pandas.Series(TARGETS.numpy(), index=range(100, 120))),
    "frames": (frame(), pandas.DataFrame({"y": TARGETS.numpy()})),
    "nullable columns": (frame().astype("Float64"), pandas.Series(TARGETS.numpy(), dtype="Int64")),
    "a tensor data set": TensorDataset(INPUTS, TARGETS),
    "a data set": Pairs(),
    "a subset": Subset(Pairs(), range(20)),
    "a list of samples": [(INPUTS[index], int(TARGETS[index])) for index in range(20)],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_one_data_set_gives_the_same_samples_and_holds_out_a_fifth_for_testing(form):
    expected, data = loaded((INPUTS, TARGETS)), loaded(FORMS[form])
    assert [len(split) for split in (data.train, data.validation, data.test)] == [14, 2, 4]
    for split in ("train", "validation", "test"):
        assert samples(getattr(data, split)) == samples(getattr(expected, split))
    everything = [row for split in (data.train, data.validation, data.test) for row in samples(split)]
    assert sorted(everything) == sorted((*row, y) for row, y in zip(INPUTS.tolist(), TARGETS.tolist(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_can_be_a_split(form):
    part = FORMS[form]
    two, three = loaded((part, part)), loaded((part, part, part))
    assert (len(two.train), len(two.validation), len(two.test)) == (18, 2, 20)
    assert (len(three.train), len(three.validation), len(three.test)) == (20, 20, 20)
    assert samples(three.train) == samples(three.validation) == samples(three.test) == samples(two.test)


def test_the_forms_of_splits_may_differ():
    data = loaded(((INPUTS, TARGETS), Pairs(), (frame(), TARGETS.numpy())))
    assert samples(data.train) == samples(data.validation) == samples(data.test)


def test_the_held_out_part_depends_on_the_seed_and_the_fraction_and_has_every_class():
    first, again, other = (loaded((INPUTS, TARGETS), seed) for seed in (0, 0, 1))
    assert samples(first.test) == samples(again.test) != samples(other.test)
    half = loaded((INPUTS, TARGETS), test_fraction=0.5)
    assert len(half.test) == 10
    assert half.test.targets.bincount().tolist() == [5, 5]


def test_two_arrays_are_one_pair_and_two_pairs_are_two_splits():
    assert len(split_parts((INPUTS, INPUTS))) == 1  # real targets, (N, C)
    assert len(split_parts((INPUTS[:2], TARGETS[:2]))) == 1
    assert len(split_parts(([1.0, 2.0], [0, 1]))) == 1
    assert len(split_parts(([[1.0], [2.0]], ["no", "yes"]))) == 1
    assert len(split_parts(((INPUTS, TARGETS), (INPUTS, TARGETS)))) == 2
    assert len(split_parts([[INPUTS, TARGETS], [INPUTS, TARGETS], [INPUTS, TARGETS]])) == 3
    assert len(split_parts((Pairs(), Pairs()))) == 2
    assert len(split_parts([(INPUTS[0], 0), (INPUTS[1], 1), (INPUTS[2], 0), (INPUTS[3], 1)])) == 1


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (INPUTS, ("of type Tensor",)),
        ({"train": (INPUTS, TARGETS)}, ("of type dict",)),
        ("digits.csv", ("of type str",)),
        ([], ("of type list",)),
        ([[1.0, 2.0], [0, 1]], ("a list of list, list",)),  # an array, or a pair? a tuple is a pair
        ((INPUTS, None), ("a tuple of Tensor, NoneType",)),
        ((INPUTS, TARGETS, TARGETS), ("a tuple of Tensor, Tensor, Tensor",)),
        ((Pairs(), TARGETS), ("a tuple of Pairs, Tensor",)),
        ((INPUTS, INPUTS, TARGETS, TARGETS), ("((X_train, y_train), (X_test, y_test))",)),
        (frame(), ('frame.drop(columns="target")',)),
        (DataLoader(Pairs()), ("loader.dataset",)),
        ((DataLoader(Pairs()), DataLoader(Pairs())), ("loader.dataset",)),
        (Endless(), ("__getitem__ and __len__",)),
    ],
)
def test_anything_else_is_an_error_that_lists_the_forms(data, parts):
    with pytest.raises(ek.DataError) as caught:
        split_parts(data)
    for part in (*parts, "(X, y)", "(train, test)", "(train, validation, test)"):
        assert part in caught.value.line


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ((INPUTS, TARGETS[:5]), "20 inputs, but 5 targets"),
        ((INPUTS[:0], TARGETS[:0]), "no samples"),
        ((frame().assign(d="x", e=pandas.Timestamp(0)), TARGETS), 'other values in "d", "e"; .*data set "table"'),
        ((np.full((20, 3), "x"), TARGETS), "expected numbers"),
        ((np.full((20, 3), {}), TARGETS), "expected numbers"),
        ((INPUTS.numpy() * 1j, TARGETS), "expected numbers, got values of type complex"),
        ((frame().mask(frame() == 30), TARGETS), "not a finite number: nan.*sample 10"),
        ((INPUTS, -TARGETS), 'expected class indices from 0 to .*data set "given" sample 1;'),
        ((INPUTS, pandas.Series([None, *["a"] * 19])), "the target is missing.*sample 0"),
        ((INPUTS, pandas.Series([*[1] * 19, None], dtype="Int64")), "(missing|not finite).*sample 19"),
        (((INPUTS, TARGETS), (INPUTS, ["no"] * 20)), "names of classes in one part and numbers in another"),
    ],
)
def test_bad_values_are_errors_that_name_the_place(data, what):
    with pytest.raises(ek.DataError) as caught:
        loaded(data)
    assert re.search(what, caught.value.line), caught.value.line


@pytest.mark.parametrize("kind", [list, np.array, pandas.Series, lambda names: pandas.Series(names, dtype="category")])
def test_names_of_classes_are_numbered_in_their_order_over_all_splits(kind):
    names = ["no", "yes"] * 10
    data = loaded(((INPUTS, kind(names)), (INPUTS, kind(["maybe"] * 20))))
    assert data.classes == ("maybe", "no", "yes")
    assert data.test.targets.tolist() == [0] * 20
    assert data.info.num_outputs == 3


def test_real_targets_are_regression():
    assert loaded((INPUTS, INPUTS.numpy()[:, 0])).info.form == "3 inputs and 1 values"
    assert loaded((frame(), frame()[["a", "b"]])).info.form == "3 inputs and 2 values"


def test_small_numbers_of_a_frame_are_not_taken_for_pixels():
    numbers = frame().astype("uint8")
    assert samples(loaded(((numbers, TARGETS),) * 2).test)[1][:3] == (3.0, 4.0, 5.0)
    assert samples(loaded(((numbers.to_numpy(), TARGETS),) * 2).test)[1][:3] == pytest.approx(
        (3 / 255, 4 / 255, 5 / 255)
    )


def test_a_spec_needs_no_data_if_data_is_passed(tmp_path):
    run = ek.train(SPEC, tmp_path / "run", data=(INPUTS, TARGETS), progress=False)
    assert (run.spec.data.name, len(run.members)) == ("given", 2)
    with pytest.raises(ek.EnsemblekitError, match="data: missing"):
        ek.train(SPEC, tmp_path / "other", progress=False)
    with pytest.raises(ek.EnsemblekitError, match="data: missing"):
        ek.load_spec(SPEC)
    assert ek.load_spec(SPEC, in_memory=True).data.name == "given"


def test_parameters_of_the_data_need_no_name_and_those_of_a_replaced_data_set_stay(tmp_path):
    spec = ek.load_spec(SPEC | {"data": {"test_fraction": 0.5, "validation_fraction": 0}}, in_memory=True)
    assert (spec.data.test_fraction, spec.data.validation_fraction) == (0.5, 0)
    digits = ek.load_spec(SPEC | {"data": {"name": "digits", "validation_fraction": 0.3}})
    run = ek.train(digits, tmp_path / "run", data=(INPUTS, TARGETS), progress=False)
    assert (run.spec.data.name, run.spec.data.validation_fraction) == ("given", 0.3)


def test_a_run_on_one_data_set_is_resumed_with_it_on_the_same_split(tmp_path):
    data = (INPUTS.numpy(), np.array(["no", "yes"])[TARGETS])
    spec = SPEC | {"training": {"epochs": 2}}
    whole = ek.train(spec, tmp_path / "whole", data=data, progress=False)
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "stopped", data=data, progress=CrashOnSave(1))
    resumed = ek.resume(tmp_path / "stopped", data=data, progress=False)
    assert resumed.metrics == whole.metrics
    with pytest.raises(ek.DataError, match=r"(?s)data passed in Python.*pass it with data="):
        ek.evaluate_run(whole.path)
    assert ek.evaluate_run(whole.path, data=data).keys() == whole.metrics.keys()


@pytest.mark.parametrize("as_dataset", [False, True])
def test_labels_that_are_no_class_indices_are_refused_before_a_network_is_built(as_dataset, tmp_path):
    labels = torch.where(TARGETS == 0, 0, 5000)
    data = TensorDataset(INPUTS, labels) if as_dataset else (INPUTS.numpy(), labels.numpy())
    with pytest.raises(ek.DataError, match="labels run from 0 to 5000, but only 2 differ") as error:
        ek.train(SPEC, tmp_path / "run", data=data, progress=False)
    assert "number the classes from 0, or pass the labels as text" in error.value.fix
    texts = [str(int(label)) for label in labels]
    assert InMemoryData().of((INPUTS, texts))._info.num_outputs == 2


@pytest.mark.parametrize(("largest", "accepted"), [(999, True), (1000, False)])
def test_up_to_1000_classes_may_have_no_samples(largest, accepted):
    data = InMemoryData()
    labels = torch.where(TARGETS == 0, 0, largest)
    if accepted:
        assert data.of((INPUTS, labels))._info.num_outputs == largest + 1
    else:
        with pytest.raises(ek.DataError, match="only 2 differ"):
            data.of((INPUTS, labels))
