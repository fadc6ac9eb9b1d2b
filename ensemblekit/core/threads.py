"""Spreads members over the cores of the machine: a thread for each core.

Small operations gain little from several threads, and those threads wait for each other at the end of each operation;
members never wait for each other. Where a core is busy with other work, the other cores compute more of the members.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

import torch

Item = TypeVar("Item")


def num_cores() -> int:
    """Return the number of cores for this process; processes that torchrun has started share those of the machine."""
    return max(cores_of_machine() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def cores_of_machine() -> int:
    """Return the number of cores of the machine, as far as this process may use them.

    The environment variable ENSEMBLEKIT_CORES lowers it, where a scheduler grants a number of cores but binds to none.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("ENSEMBLEKIT_CORES", "")
    return min(available, int(limit)) if limit.isdecimal() and int(limit) else available


class ThreadPool:
    """Threads that are started when they are first needed, and kept until `close`; a forked process starts its own."""

    def __init__(self) -> None:
        self.forget()
        _POOLS.add(self)

    def forget(self) -> None:
        """Forget all threads without stopping them: in a forked process they do not exist."""
        self.pools: dict[int, ThreadPoolExecutor] = {}
        self.lock = Lock()
        """For work that must not run several times at once; a thread that does not exist cannot hold it."""

    def map(self, work: Callable[[Item], Any], items: Sequence[Item]) -> list[Any]:
        """Do the work for every item, in parallel; a single item uses all cores."""
        if len(items) <= 1 or num_cores() == 1:
            return [work(item) for item in items]
        return list(self._pool(min(len(items), num_cores())).map(work, items))

    def _pool(self, workers: int) -> ThreadPoolExecutor:
        if workers not in self.pools:
            threads_per_worker = num_cores() // workers
            self.pools[workers] = ThreadPoolExecutor(workers, "members", _use_threads, (threads_per_worker,))
        return self.pools[workers]

    def close(self) -> None:
        """Stop the threads; they start again when they are needed."""
        for pool in self.pools.values():
            pool.shutdown()
        self.pools.clear()


_POOLS: WeakSet[ThreadPool] = WeakSet()


def _forget_threads() -> None:
    for pool in list(_POOLS):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _use_threads(number: int) -> None:
    # torch initialises the number of threads of a new Python thread at its first use, from the number set last in any
    # thread; asking for it first makes sure that our number is set afterwards.
    torch.get_num_threads()
    torch.set_num_threads(number)


def one_thread() -> AbstractContextManager[None]:
    """Keep torch from splitting small operations: where a core is busy, waiting for it costs far more."""
    return threads(1)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch split operations over so many threads, within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
