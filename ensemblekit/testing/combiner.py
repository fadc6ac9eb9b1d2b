"""The contract of a combiner: one output for each sample, from this sample's outputs and what was fitted."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.losses import DEFAULT_LOSSES, Loss
from ensemblekit.core.plugin import Combination, Task
from ensemblekit.core.seeds import generator
from ensemblekit.core.tasks import TASKS
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.testing.checks import Check, check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.reviews import call_unmodified, describe, mismatch, works_on_meta
from ensemblekit.testing.toy_run import toy_registry, toy_spec, train_toy_run

MEMBERS, SAMPLES, OUTPUTS = 5, 12, 3
HOOKS = ("combine", "fit_combiner")
LOSSES: dict[Task, Loss] = {task: kind.default_loss().named(DEFAULT_LOSSES[task]) for task, kind in TASKS.items()}


class CombinerContract(PluginContract[Combination]):
    """The checks of a combiner."""

    kind = "combiner"

    def checks(self) -> list[Check]:
        """All checks; if the hooks cannot be called, only those that call none of them."""
        return super().checks() if self.hooks_are_known else self.select(PluginContract)

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs of the members (M, N, C), float64."""
        shape = (MEMBERS, SAMPLES, OUTPUTS)
        return torch.randn(shape, generator=generator(0, "contract", "outputs"), dtype=torch.float64)

    def target(self, task: Task) -> Tensor:
        """Targets of the samples."""
        random = generator(0, "contract", "target")
        if task == "classification":
            return torch.randint(OUTPUTS, (SAMPLES,), generator=random)
        if task == "multilabel":
            return torch.randint(2, (SAMPLES, OUTPUTS), generator=random).double()
        return torch.randn(SAMPLES, OUTPUTS, generator=random, dtype=torch.float64)

    @check("it implements combine")
    def implements(self) -> None:
        """Everything else would never be called."""
        hooks = implemented_hooks(self.plugin_class)
        others = [hook for hook in hooks if hook not in HOOKS]
        if others:
            fix = "derive the class from ensemblekit.Method"
            raise self.violation(f"no hooks other than {' and '.join(HOOKS)}", others[0], others[0], fix)
        if "combine" not in hooks:
            raise self.violation("the hook combine", "no such hook", fix="implement combine with @hookimpl")

    @check("it combines outputs of every dtype and device", needs=[implements])
    def shapes(self) -> None:
        """(M, N, C) → (N, C); on the meta device too, so that no GPU has to wait."""
        for task in self.plugin.tasks:
            for device in ("cpu", "meta"):
                for dtype in (torch.float32, torch.float64):
                    outputs = self.outputs.to(device, dtype)
                    with works_on_meta(outputs.device, self.plugin_class, "combine"):
                        combined = self.combine(outputs, task)
                    if describe(combined) != describe(outputs[0]):
                        fix = "reduce over the first dimension of outputs only, the members"
                        raise self.violation(describe(outputs[0]), describe(combined), "combine", fix)
                    if device == "cpu" and not bool(combined.isfinite().all()):
                        raise self.violation("finite outputs", "nan or infinity", "combine")

    @check("a sample's output does not depend on the other samples", needs=[shapes])
    def independent_samples(self) -> None:
        """Predictions must not depend on the batch that a sample is in."""
        for task in self.plugin.tasks:
            fitted = self.fit(self.outputs, task)
            together = self.combine(self.outputs, task, fitted)
            alone = [self.combine(self.outputs[:, n : n + 1], task, fitted) for n in range(SAMPLES)]
            if wrong := mismatch(torch.cat(alone), together, 1e-9):
                fix = "reduce over the first dimension of outputs only, the members"
                raise self.violation("the same output for a sample alone and in a batch", wrong, "combine", fix)

    @check("fitting it is deterministic", needs=[shapes])
    def fitted_twice(self) -> None:
        """The same held-out outputs give a bit-identical fit, which both precisions can use."""
        for task in self.plugin.tasks:
            for dtype in (torch.float32, torch.float64):
                outputs = self.outputs.to(dtype)
                first, second = self.fit(outputs, task), self.fit(outputs, task)
                if first is None or second is None:
                    continue
                if not isinstance(first, Tensor) or not first.is_floating_point():
                    raise self.violation("a floating-point tensor, or None", describe(first), "fit_combiner")
                if wrong := mismatch(first, second, 0.0):
                    fix = "sample nothing, or from a generator with a fixed seed"
                    raise self.violation("the same fit for the same outputs", wrong, "fit_combiner", fix)
                if not bool(self.combine(outputs, task, first).isfinite().all()):
                    raise self.violation("finite outputs after the fit", "nan or infinity", "combine")

    @check("a run with it finishes", needs=[shapes, fitted_twice])
    def run_finishes(self) -> None:
        """One epoch for each task that it can be used for."""
        registry = toy_registry(self.plugin)
        for task in self.plugin.tasks:
            data = {"data.regression": task == "regression", "data.multilabel": task == "multilabel"}
            spec = toy_spec(registry, {**data, "data.validation_fraction": 0.2})
            train_toy_run(replace(spec, combiner=self.plugin), registry)

    def combine(self, outputs: Tensor, task: Task, fitted: Tensor | None = None) -> Tensor:
        """Call `combine`."""
        combined: Tensor = self._call("combine", outputs, task, fitted=fitted)
        return combined

    def fit(self, outputs: Tensor, task: Task) -> Tensor | None:
        """Call `fit_combiner`, if there is one."""
        if "fit_combiner" not in implemented_hooks(self.plugin_class):
            return None
        target = self.target(task)
        target = target.to(outputs.dtype) if target.is_floating_point() else target
        fitted: Tensor | None = self._call("fit_combiner", outputs, task, target=target)
        return fitted

    def _call(self, hook: str, outputs: Tensor, task: Task, **arguments: Any) -> Any:
        """Call a hook with the arguments that it names."""
        arguments |= {"outputs": outputs, "loss": LOSSES[task], "num_members": len(outputs), "named": {}}
        arguments |= {"members": torch.arange(len(outputs), device=outputs.device), "auxiliary": {}}
        function = getattr(self.plugin, hook)
        named = {name: arguments[name] for name in inspect.signature(function).parameters}
        return call_unmodified(self.plugin_class, hook, function, named)
