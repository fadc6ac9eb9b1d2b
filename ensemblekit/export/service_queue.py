"""The queue of the service: requests that wait are predicted together, by one thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Answers = list[dict[str, Any]]
Predict = Callable[[Tensor, int], list[dict[str, Any] | Exception]]
"""Predicts inputs (B, *input_shape) with so many probabilities: for each an answer, or why there is none."""


@dataclass(frozen=True)
class Job:
    """The samples of one request, and where its answers are put."""

    inputs: Tensor
    top: int
    answers: Future[Answers] = field(default_factory=Future)

    def finish(self, outcomes: list[dict[str, Any] | Exception]) -> None:
        """Give the request its answers, or the error of its first sample that has none."""
        error = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
        if error is not None:
            self.answers.set_exception(error)
        else:
            self.answers.set_result([outcome for outcome in outcomes if isinstance(outcome, dict)])


class Batcher:
    """Joins requests to batches, in the order in which they came.

    Args:
        predict: predicts a batch.
        max_batch: most samples of a batch.
        max_wait: seconds that the first request of a batch waits for others.
        arriving: returns the number of requests that are not in the queue yet; nobody waits if there are none.
        observe: is told the number of samples of each batch.
    """

    def __init__(
        self,
        predict: Predict,
        max_batch: int,
        max_wait: float,
        arriving: Callable[[], int] = lambda: 0,
        observe: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.predict, self.max_batch, self.max_wait = predict, max_batch, max_wait
        self.arriving, self.observe = arriving, observe
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="predictions", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._jobs)

    def submit(self, inputs: Tensor, top: int) -> Future[Answers]:
        """Queue the samples (N, *input_shape) of a request.

        Raises:
            RuntimeError: it is closed.
        """
        job = Job(inputs, top)
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue is closed")
            self._jobs.append(job)
            self._changed.notify()
        return job.answers

    def close(self) -> None:
        """Answer every request that waits, and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while jobs := self._next_jobs():
            self._answer(jobs)

    def _next_jobs(self) -> list[Job]:
        """Wait for requests, and return those of the next batch; none if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            deadline = time.monotonic() + self.max_wait
            while self._may_grow() and (remaining := deadline - time.monotonic()) > 0:
                self._changed.wait(remaining)
            jobs: list[Job] = []
            size = 0
            while self._jobs and (not jobs or size + len(self._jobs[0].inputs) <= self.max_batch):
                jobs.append(self._jobs.popleft())
                size += len(jobs[-1].inputs)
            return jobs

    def _may_grow(self) -> bool:
        is_full = sum(len(job.inputs) for job in self._jobs) >= self.max_batch
        return not is_full and not self._closed and self.arriving() > 0

    def _answer(self, jobs: list[Job]) -> None:
        try:
            inputs = jobs[0].inputs if len(jobs) == 1 else torch.cat([job.inputs for job in jobs])
            outcomes: list[dict[str, Any] | Exception] = []
            top = max(job.top for job in jobs)
            for part in inputs.split(self.max_batch):
                self.observe(len(part))
                outcomes += self.predict(part, top)
        except Exception as error:  # a network may raise anything; the thread must go on
            if len(jobs) == 1:
                jobs[0].answers.set_exception(error)
                return
            for job in jobs:  # so that nobody gets the error of somebody else's request
                self._answer([job])
            return
        first = 0
        for job in jobs:
            job.finish(outcomes[first : first + len(job.inputs)])
            first += len(job.inputs)
