"""Requests that wait are predicted together, and each gets its own answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ensemblekit.export.service_queue import Batcher


class Recorded:
    """Answers with the inputs themselves, remembers the sizes of batches, and waits until it is let go."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.tops: list[int] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, inputs: torch.Tensor, top: int) -> list[dict[str, Any] | Exception]:
        self.sizes.append(len(inputs))
        self.tops.append(top)
        self.entered.set()
        assert self.go.wait(10)
        if bool((inputs < 0).any()) and len(inputs) > 1:
            raise RuntimeError("the whole batch fails")
        return [ValueError(f"{value}") if value < 0 else {"value": value} for value in inputs.flatten().tolist()]


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


@pytest.fixture
def predict() -> Recorded:
    return Recorded()


@pytest.fixture
def batcher(predict):
    made = Batcher(predict, max_batch=4, max_wait=0.0)
    yield made
    predict.go.set()
    made.close()


def values(future: Any) -> list[float]:
    return [answer["value"] for answer in future.result(10)]


def test_requests_that_wait_are_joined_up_to_the_largest_batch_and_split_again_in_order(batcher, predict):
    first = batcher.submit(rows(0), 1)
    assert predict.entered.wait(10)
    others = [batcher.submit(rows(*numbers), 5) for numbers in [(1, 2), (3,), (4, 5)]]
    assert len(batcher) == 3
    predict.go.set()
    assert [values(future) for future in (first, *others)] == [[0], [1, 2], [3], [4, 5]]
    assert predict.sizes == [1, 3, 2]
    assert predict.tops == [1, 5, 5]


def test_a_request_that_is_larger_than_a_batch_is_predicted_in_parts(batcher, predict):
    predict.go.set()
    assert values(batcher.submit(rows(*range(10)), 1)) == list(range(10))
    assert predict.sizes == [4, 4, 2]


def test_nobody_gets_the_error_of_somebody_elses_request(batcher, predict):
    first = batcher.submit(rows(0), 1)
    assert predict.entered.wait(10)
    bad, good = batcher.submit(rows(-1), 1), batcher.submit(rows(7), 1)
    predict.go.set()
    assert values(first) == [0]
    assert values(good) == [7]
    with pytest.raises(ValueError, match="-1"):
        bad.result(10)


def test_what_waits_is_answered_before_the_queue_closes(batcher, predict):
    futures = [batcher.submit(rows(number), 1) for number in range(9)]
    threading.Timer(0.05, predict.go.set).start()
    batcher.close()
    assert all(future.done() for future in futures)
    assert [values(future) for future in futures] == [[number] for number in range(9)]
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(rows(1), 1)


def test_a_request_waits_for_others_only_while_some_are_arriving(predict):
    predict.go.set()
    arriving = [1]
    batcher = Batcher(predict, max_batch=4, max_wait=5.0, arriving=lambda: arriving[0])
    first = batcher.submit(rows(1), 1)
    with pytest.raises(TimeoutError):
        first.result(0.05)
    arriving[0] = 0
    second = batcher.submit(rows(2), 1)
    assert values(first) + values(second) == [1, 2]
    assert predict.sizes == [2]
    batcher.close()
