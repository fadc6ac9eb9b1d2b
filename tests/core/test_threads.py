"""Work is spread over the cores, in order, and a lone piece of it has them all."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ensemblekit.core import threads as cores
from ensemblekit.core.threads import ThreadPool, one_thread


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(cores, "num_cores", lambda: 4)
    spread = ThreadPool()
    yield spread
    spread.close()


def test_results_come_in_the_order_of_the_items_whoever_is_faster(four):
    def work(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    assert four.map(work, range(6)) == [0, 1, 4, 9, 16, 25]


@pytest.mark.parametrize(("items", "workers", "threads"), [(8, 4, 1), (4, 4, 1), (2, 2, 2)])
def test_every_thread_has_its_share_of_the_cores(four, items, workers, threads):
    barrier = threading.Barrier(workers)

    def work(_: int) -> tuple[str, int]:
        barrier.wait(timeout=10)
        return threading.current_thread().name, torch.get_num_threads()

    seen = four.map(work, range(items))
    assert {number for _, number in seen} == {threads}
    assert len({name for name, _ in seen}) == workers


def test_a_lone_item_is_done_by_the_caller_with_all_its_threads(four):
    before = torch.get_num_threads()
    assert four.map(lambda _: (threading.current_thread(), torch.get_num_threads()), [0]) == [
        (threading.current_thread(), before)
    ]


def test_nothing_to_do_gives_nothing(four):
    assert four.map(lambda item: item, []) == []


def test_the_callers_number_of_threads_stays(four):
    before = torch.get_num_threads()
    four.map(lambda _: torch.ones(3).sum(), range(8))
    assert torch.get_num_threads() == before


def test_an_error_reaches_the_caller_and_the_threads_go_on(four):
    with pytest.raises(ZeroDivisionError):
        four.map(lambda item: 1 // item, [1, 0, 1])
    assert four.map(lambda item: item, [1, 2]) == [1, 2]


def test_after_closing_no_thread_is_left_and_new_ones_start_when_needed(four):
    others = set(threading.enumerate())  # ensembles of other tests may have threads
    four.map(lambda item: item, range(8))
    assert set(threading.enumerate()) > others
    four.close()
    assert set(threading.enumerate()) <= others
    assert four.map(lambda item: item, [1, 2]) == [1, 2]


def test_one_thread_is_for_a_block_only():
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
