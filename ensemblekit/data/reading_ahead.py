"""Reading ahead: threads read the next batches of a stream while the last one is used.

Batches come in their order, whatever the number of threads, so that a run does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ensemblekit.core.threads import num_cores

BATCHES_AHEAD = 8
BYTES_AHEAD = 2**26
"""Samples that wait to be used take at most so much memory, unless a single batch takes more."""
SAMPLES_PER_TASK = 32
"""Threads share a batch in parts of this size: the first batch of an epoch is waited for."""


def read_ahead(
    read: Callable[[Tensor], Tensor], index_batches: Sequence[Tensor], sample_bytes: int
) -> Iterator[Tensor]:
    """Read batches in threads, some batches ahead of their use.

    Args:
        read: Reads the samples (B, …) at some indices (B,); called from several threads at once.
        index_batches: The indices of each batch.
        sample_bytes: Size of a sample, which limits the number of batches ahead.

    Yields:
        The batches, in order. An error of `read` is raised where its batch would come.
    """
    longest = max(map(len, index_batches), default=0)
    ahead = max(1, min(BATCHES_AHEAD, BYTES_AHEAD // max(1, longest * sample_bytes)))
    pool = ThreadPoolExecutor(num_cores(), "reading")
    running: deque[list[Future[Tensor]]] = deque()
    try:
        for indices in index_batches:
            running.append([pool.submit(read, part) for part in indices.split(SAMPLES_PER_TASK)])
            if len(running) > ahead:
                yield _joined(running.popleft())
        while running:
            yield _joined(running.popleft())
    finally:  # also if nobody wants the rest
        pool.shutdown(cancel_futures=True)


def _joined(parts: list[Future[Tensor]]) -> Tensor:
    read = [part.result() for part in parts]
    return read[0] if len(read) == 1 else torch.cat(read)
