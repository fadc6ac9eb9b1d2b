"""The contract of a metric: one finite number that does not depend on the order of the samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ensemblekit.core.losses import DEFAULT_LOSSES, Loss
from ensemblekit.core.metrics import METRIC_GROUPS, Metric
from ensemblekit.core.plugin import Task
from ensemblekit.core.seeds import generator
from ensemblekit.core.tasks import TASKS
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.reviews import call_unmodified, describe
from ensemblekit.testing.toy_run import NUM_CLASSES, toy_registry, toy_spec, train_toy_run

MEMBERS, SAMPLES = 3, 40
LOSSES: dict[Task, Loss] = {task: kind.default_loss().named(DEFAULT_LOSSES[task]) for task, kind in TASKS.items()}


class MetricContract(PluginContract[Metric]):
    """The checks of a metric."""

    kind = "metric"

    @check("its name is not that of a built-in metric")
    def own_name(self) -> None:
        """Results would show one of the two under the name of the other."""
        if self.plugin.name in {name for names in METRIC_GROUPS.values() for name in names}:
            raise self.violation("another name", f'"{self.plugin.name}"', fix="rename the class or its entry point")

    @check("it is one finite number in both precisions")
    def number(self) -> None:
        """For each task that it can be used for."""
        for task in self.plugin.tasks:
            for dtype in (torch.float32, torch.float64):
                value = self.compute(task, *_samples(task, dtype))
                scalar = isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)
                if not scalar or not bool(torch.as_tensor(value).isfinite()):
                    got = describe(value) if not scalar else f"{float(value)}"
                    raise self.violation("one finite number", got, "compute")

    @check("it does not depend on the order of the samples", needs=[number])
    def order(self) -> None:
        """Samples are evaluated in the order of the data set, which means nothing."""
        for task in self.plugin.tasks:
            outputs, target = _samples(task, torch.float64)
            first = float(self.compute(task, outputs, target))
            second = float(self.compute(task, outputs.flip(1), target.flip(0)))
            if abs(first - second) > 1e-9 * max(1.0, abs(first)):
                raise self.violation("the same value for samples in another order", f"{second} instead of {first}")

    @check("a run with it has it in its metrics", needs=[own_name, number])
    def in_a_run(self) -> None:
        """One epoch for each task that it can be used for."""
        registry = toy_registry(self.plugin)
        for task in self.plugin.tasks:
            data = {"data.regression": task == "regression", "data.multilabel": task == "multilabel"}
            spec = toy_spec(registry, data)
            run = train_toy_run(replace(spec, metrics=(self.plugin,)), registry)
            if f"test_{self.plugin.name}" not in run.metrics:
                raise self.violation(f"test_{self.plugin.name} in the metrics of a run", "no such metric", "compute")

    def compute(self, task: Task, outputs: Tensor, target: Tensor) -> Tensor | float:
        """Call `compute`."""
        arguments = {"outputs": outputs, "combined": outputs.mean(dim=0), "target": target}
        call = partial(self.plugin.compute, loss=LOSSES[task])
        value: Tensor | float = call_unmodified(self.plugin_class, "compute", call, arguments)
        return value


def _samples(task: Task, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = generator(0, "contract", "metric")
    outputs = torch.randn(MEMBERS, SAMPLES, NUM_CLASSES, generator=random, dtype=torch.float64).to(dtype)
    if task == "classification":
        return outputs, torch.randint(NUM_CLASSES, (SAMPLES,), generator=random)
    if task == "multilabel":
        return outputs, torch.randint(2, (SAMPLES, NUM_CLASSES), generator=random).to(dtype)
    return outputs, torch.randn(SAMPLES, NUM_CLASSES, generator=random, dtype=torch.float64).to(dtype)
