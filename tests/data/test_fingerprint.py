"""A run knows its data: other data is refused on resume and evaluate, with the split and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stopping import Stop, StopBefore
from torch.utils.data import Dataset as TorchDataset

import ensemblekit as ek
from ensemblekit.core.errors import DataError
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.in_memory import data_from_datasets
from ensemblekit.runs.directory import RunDirectory

SPEC = {
    "data": {"name": "given", "validation_fraction": 0.25},
    "model": {"name": "mlp", "hidden": [2], "batch_norm": False},
    "ensemble": {"members": 2},
    "training": {"epochs": 2, "batch_size": 8},
    "engine": {"name": "sequential", "device": "cpu"},
}


def pair(count: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] > 0).long()


class Samples(TorchDataset[Any]):
    """The samples of a pair, one by one; with noise they differ each time they are read."""

    def __init__(self, samples: tuple[torch.Tensor, torch.Tensor], noise: float = 0.0) -> None:
        self.inputs, self.targets = samples
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + self.noise * torch.rand(()), self.targets[index]


def fingerprint(train: Any, test: Any, **parameters: Any) -> Any:
    return data_from_datasets(train, test, seed=0, **parameters).fingerprint


def test_the_same_data_has_the_same_fingerprint_in_memory_and_as_a_stream():
    known = fingerprint(pair(), pair(5, 1), validation_fraction=0.25)
    assert set(known) == {"train", "test", "validation"}
    for storage in ("memory", "stream"):
        samples = Samples(pair()), Samples(pair(5, 1))
        assert fingerprint(*samples, storage=storage, validation_fraction=0.25) == known
    check_same_data(known, known, "given")


def changed_input(samples):
    inputs = samples[0].clone()
    inputs[3, 1] += 1
    return inputs, samples[1]


CHANGES = {
    "the targets changed": lambda samples: (samples[0], 1 - samples[1]),
    "the inputs changed": changed_input,
    "the number of samples changed from 5 to 4": lambda samples: (samples[0][:4], samples[1][:4]),
    "the shape of an input changed from [4] to [1, 4]": lambda samples: (samples[0].unsqueeze(1), samples[1]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_a_difference_is_named_with_its_split(change, storage):
    train, test = pair(), pair(5, 1)
    known = fingerprint(Samples(train), Samples(test), storage=storage, validation_fraction=0.0)
    other = CHANGES[change](test)
    same_form = (train[0].unsqueeze(1), train[1]) if other[0].dim() == 3 else train
    found = fingerprint(Samples(same_form), Samples(other), storage=storage, validation_fraction=0.0)
    with pytest.raises(DataError, match="the data is not what the run was started with") as caught:
        check_same_data({"test": known["test"]}, {"test": found["test"]}, "given")
    assert "test split" in caught.value.what
    assert change in caught.value.what
    assert caught.value.exit_code == 3


def test_a_split_that_was_not_there_is_a_difference():
    known = fingerprint(pair(), pair(5, 1), validation_fraction=0.0)
    with_validation = fingerprint(pair(), pair(5, 1), validation_fraction=0.25)
    with pytest.raises(DataError, match="train split: the number of samples changed from 20 to 15"):
        check_same_data(known, with_validation, "given")
    with pytest.raises(DataError, match="validation split: it was not there"):
        check_same_data({}, {"validation": with_validation["validation"]}, "given")


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_samples_with_random_transforms_are_compared_by_their_targets_only(storage):
    first, second = (
        fingerprint(Samples(pair(), noise=1.0), Samples(pair(5, 1), noise=1.0), storage=storage) for _ in range(2)
    )
    assert first["train"]["inputs_sha256"] is None
    check_same_data(first, second, "given")
    flipped = Samples((pair()[0], 1 - pair()[1]), noise=1.0)
    other = fingerprint(flipped, Samples(pair(5, 1), noise=1.0), storage=storage)
    with pytest.raises(DataError, match="train split: the targets changed"):
        check_same_data(first, other, "given")


def test_a_run_is_not_resumed_on_other_data_and_stays_as_it_was(tmp_path):
    data = pair(), pair(5, 1)
    with pytest.raises(Stop):
        ek.train(SPEC, tmp_path / "run", progress=StopBefore(2), data=data)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    flipped = (data[0][0], 1 - data[0][1])
    with pytest.raises(DataError, match="split: the targets changed"):
        ek.resume(tmp_path / "run", progress=False, data=(flipped, data[1]))
    assert {path: path.read_bytes() for path in files} == files
    assert ek.resume(tmp_path / "run", progress=False, data=data).status == "finished"


def test_a_table_that_was_changed_is_noticed_by_evaluate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs, targets = pair(40)
    rows = [
        f"{','.join(f'{value:.4f}' for value in row)},{int(target)}"
        for row, target in zip(inputs, targets, strict=True)
    ]
    Path("data.csv").write_text("\n".join(["a,b,c,d,class", *rows]) + "\n")
    spec = {**SPEC, "data": {"name": "table", "path": "data.csv", "target": "class"}}
    run = ek.train(spec, "run", progress=False)
    before = ek.evaluate_run("run")
    assert RunDirectory.open("run").environment["data"]["train"]["samples"] > 0
    flipped = [row[:-1] + str(1 - int(row[-1])) for row in rows]
    Path("data.csv").write_text("\n".join(["a,b,c,d,class", *flipped]) + "\n")
    with pytest.raises(DataError, match="the targets changed"):
        ek.evaluate_run("run")
    Path("data.csv").write_text("\n".join(["a,b,c,d,class", *rows]) + "\n")
    assert ek.evaluate_run("run") == before
    assert run.status == "finished"
