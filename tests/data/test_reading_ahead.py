"""Batches that are read ahead come in their order, in bounded memory, and nothing is read for nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Self

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor

import ensemblekit as ek
from ensemblekit.data import reading_ahead
from ensemblekit.data.reading_ahead import read_ahead


def batches(number: int, size: int) -> list[Tensor]:
    return list(torch.arange(number * size).split(size))


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(monkeypatch, cores):
    monkeypatch.setattr(reading_ahead, "num_cores", lambda: cores)
    first = threading.Event()

    def read(indices: Tensor) -> Tensor:
        if indices[0] == 0 and cores > 1:  # the first part is the last to be read
            first.wait(5)
        if indices[0] > 100:
            first.set()
        return 3 * indices

    found = list(read_ahead(read, batches(5, 70), 1))
    assert [batch.tolist() for batch in found] == [(3 * batch).tolist() for batch in batches(5, 70)]


@pytest.mark.parametrize(("sample_bytes", "ahead"), [(1, reading_ahead.BATCHES_AHEAD), (2**25, 1), (2**22, 4)])
def test_only_a_few_batches_are_read_before_they_are_needed(sample_bytes, ahead):
    read: list[int] = []
    stream = read_ahead(lambda indices: read.extend(indices.tolist()) or indices, batches(40, 4), sample_bytes)
    for step in range(1, 11):
        next(stream)
        assert 4 * step <= len(read) <= 4 * (step + ahead)
    stream.close()
    assert len(read) <= 4 * (10 + ahead)
    assert not any(thread.name.startswith("reading") for thread in threading.enumerate())


def test_an_error_is_raised_where_its_batch_would_come():
    def read(indices: Tensor) -> Tensor:
        if 9 in indices:
            raise ek.DataError("cannot be read", "sample 9", "fix it")
        return indices

    stream = read_ahead(read, batches(5, 4), 1)
    assert next(stream).tolist() == [0, 1, 2, 3]
    assert next(stream).tolist() == [4, 5, 6, 7]
    with pytest.raises(ek.DataError, match="sample 9"):
        next(stream)


class Images(torch.utils.data.Dataset):
    """Images that are read in batches, in threads."""

    def __init__(self, inputs: Tensor, targets: Tensor, wrong: int | None = None) -> None:
        self.inputs, self.targets, self.wrong = inputs, targets, wrong
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index])

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.threads.add(threading.current_thread().name)
        targets = self.targets[list(indices)].clone()
        if self.wrong in indices:
            targets[list(indices).index(self.wrong)] += 1
        return self.inputs[list(indices)], targets


def samples(number: int = 90) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (number, 3, 8, 8), dtype=torch.uint8, generator=random)
    return inputs, torch.arange(number) % 3


class Streamed(ek.ImageDataset):
    """A data set plugin whose samples are read in batches."""

    _images: Images | None = PrivateAttr(None)

    @classmethod
    def of(cls, images: Images, **parameters: Any) -> Self:
        dataset = cls(storage="stream", **parameters)
        dataset._images = images
        return dataset

    def load(self, seed: int) -> ek.Splits:
        assert self._images is not None
        return ek.Splits(
            self._images, self._images, ek.DataInfo("classification", (3, self.size or 8, self.size or 8), 3)
        )


def test_epochs_equal_those_of_data_in_memory():
    stream = Images(*samples())
    parameters = {"augment": ["crop", "flip"], "normalise": True, "size": 6, "split_seed": 3}
    streamed = ek.load_data(Streamed.of(stream, **parameters), 0)
    kept = ek.data_from_datasets(samples(), samples(), 0, **parameters)
    for epoch in (1, 2):
        pairs = zip(
            streamed.train.training_batches(16, 0, epoch), kept.train.training_batches(16, 0, epoch), strict=True
        )
        for one, other in pairs:
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
            assert torch.equal(one.index, other.index)
    assert stream.threads
    assert all(name.startswith("reading") for name in stream.threads)


def test_a_wrong_target_is_named_as_for_single_samples():
    stream = Images(*samples(), wrong=7)
    with pytest.raises(ek.DataError, match=r"target is 2, but 1(.|\n)*sample 7"):
        ek.load_data(Streamed.of(stream, size=6), 0)


def test_a_number_that_is_not_finite_is_named_as_for_single_samples():
    inputs, targets = samples()
    inputs = inputs.float()
    inputs[5, 1, 2, 3] = torch.inf
    with pytest.raises(ek.DataError, match=r"not a finite number: inf at \[1, 2, 3\](.|\n)*sample 5"):
        ek.load_data(Streamed.of(Images(inputs, targets)), 0)
