"""A run that is served: the ensemble, its queue, what it counts, and whether it still takes requests."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, ParamSpec

import torch
from torch import Tensor

import ensemblekit
from ensemblekit.core.streams import printable
from ensemblekit.export.service_answers import Record, predicted_records, with_top
from ensemblekit.export.service_bodies import FIELD, JSON
from ensemblekit.export.service_inputs import ImageRows, rows_of
from ensemblekit.export.service_limits import Limits, Refused
from ensemblekit.export.service_metrics import ServiceMetrics
from ensemblekit.export.service_queue import Batcher
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.runs.run import Run
from ensemblekit.runs.sealing import finite

PREPARING_THREADS = 2
"""Requests whose rows or images are prepared at one time; this also limits the memory for decoding."""
Arguments = ParamSpec("Arguments")


class Service:
    """A run that is served.

    Args:
        run: the run, for its description.
        ensemble: its ensemble.
        limits: how much clients may send.

    Raises:
        PluginError: the run's data set can prepare only files.
        RunError: the run did not save how its table was prepared.
    """

    def __init__(self, run: Run, ensemble: Ensemble, limits: Limits) -> None:
        self.ensemble, self.limits = ensemble.eval(), limits
        self.rows = rows_of(ensemble)
        self.is_draining = False
        """Whether it only answers requests that it has admitted."""
        self.num_admitted = 0
        """Requests that are read, prepared or wait for their answer."""
        self._num_queued = 0
        predict = partial(predicted_records, ensemble)
        predict(torch.zeros(1, *ensemble.info.input_shape), 1)  # folds the members and starts their threads
        self.metrics = ServiceMetrics(lambda: len(self.batcher))
        self.batcher = Batcher(
            predict,
            limits.max_batch,
            limits.max_wait_seconds,
            lambda: self.num_admitted - self._num_queued,
            self.metrics.batch_size.observe,
        )
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, "prepare")
        self.model = _description(run, ensemble, self.rows.description, limits)
        """What /model returns."""

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Admit a request, until it has its answer.

        Raises:
            Refused: the service is stopping, or too many requests wait.
        """
        self.check_open()
        if self.num_admitted >= self.limits.max_queue:
            what = f"{self.num_admitted:,} requests wait already"
            raise Refused(429, what, "try again in a second, or send fewer requests at once", {"Retry-After": "1"})
        self.num_admitted += 1
        try:
            yield
        finally:
            self.num_admitted -= 1

    def check_open(self) -> None:
        """Refuse a request if the service is stopping."""
        if self.is_draining:
            raise Refused(503, "the service is stopping", "send the request to another one, or later")

    async def prepared(
        self, prepare: Callable[Arguments, Tensor], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Tensor:
        """Prepare the inputs of a request in another thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._preparing, partial(prepare, *args, **options))

    async def answers(self, inputs: Tensor, top: int) -> list[Record]:
        """Queue the inputs (N, *input_shape) of a request, and wait for its answers."""
        self._num_queued += 1
        try:
            records = await asyncio.wrap_future(self.batcher.submit(inputs, top))
        finally:
            self._num_queued -= 1
        return [with_top(record, top) for record in records]

    def close(self) -> None:
        """Answer what waits, and stop all threads."""
        self._preparing.shutdown()
        self.batcher.close()

    def examples(self, address: str) -> list[str]:
        """Return commands that ask this very service."""
        url, commands = f"{address}/predict", []
        if isinstance(self.rows, ImageRows) and self.rows.takes_files:
            commands.append(f"curl -F {FIELD}=@first.png -F {FIELD}=@second.png {url}")
        else:
            example = self.rows.example
            body = "@rows.json" if example is None else json.dumps({"rows": [example]})
            commands.append(f"curl -H 'Content-Type: {JSON}' -d {shlex.quote(body)} {url}")
        return [*commands, f"curl {address}/model"]


def _description(run: Run, ensemble: Ensemble, rows: dict[str, Any], limits: Limits) -> dict[str, Any]:
    spec, calibration, conformal = run.spec, ensemble.calibration, ensemble.conformal
    description: dict[str, Any] = finite(
        {
            "run": printable(run.path.resolve().name),
            "version": ensemblekit.__version__,
            "task": ensemble.info.task,
            "spec": {
                "data": spec.data.name,
                "model": list(dict.fromkeys(model.name for model in spec.member_models)),
                "method": [method.name for method in spec.methods],
                "members": spec.ensemble.members,
                "loss": spec.loss.name,
                "combiner": spec.combiner.name if spec.combiner is not None else None,
                "seed": spec.seed,
            },
            "classes": None if ensemble.classes is None else list(ensemble.classes),
            "metrics": run.metrics,
            "calibration": None if calibration is None else calibration.description,
            "prediction_sets": None if conformal is None else conformal.description,
            "input": rows,
            "limits": asdict(limits),
        }
    )
    return description
