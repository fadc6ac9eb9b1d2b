"""The contract of a loss: one value per sample that depends on this sample alone, with correct derivatives."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import Problem
from ensemblekit.core.losses import Loss
from ensemblekit.core.plugin import PREDICTED, Task
from ensemblekit.core.seeds import generator
from ensemblekit.core.tasks import TASKS
from ensemblekit.spec.sections import Spec
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.numeric_gradients import gradient_pair
from ensemblekit.testing.reviews import describe, first_line, mismatch, spec_problems, works_on_meta
from ensemblekit.testing.toy_run import ToyNetwork, toy_registry, toy_spec, train_toy_run

MEMBERS, BATCH = 2, 4
CLASSES, VALUES = (3, 2, 10), (2, 1)
"""Numbers of classes, and of real values, that are tried in turn: a loss may support only one of them."""
STEP = 1e-3
"""Step of the second difference: rounding in float64 and the truncation error are both about 1e-6."""


class LossContract(PluginContract[Loss]):
    """The checks of a loss."""

    kind = "loss"

    @cached_property
    def spec(self) -> Spec:
        """A toy run on data that the loss accepts."""
        tasks: list[tuple[Task, int]] = [("classification", size) for size in CLASSES]
        if self.plugin.takes == "values":
            tasks = [*(("regression", size) for size in VALUES), *tasks]
        if self.plugin.takes == "labels":
            tasks = [("multilabel", size) for size in CLASSES]
        found: list[Problem] = []
        for task in tasks:
            spec = self._spec(*task)
            problems = spec_problems(self.plugin, spec)
            if not problems:
                return spec
            found += problems
        raise self.violation(
            "check_spec() and check_data() to accept data for regression or classification",
            "; ".join(dict.fromkeys(map(str, found))),
            "check_data",
            "reject only what cannot work; tried: " + ", ".join(f"{size} {PREDICTED[task]}" for task, size in tasks),
        )

    def _spec(self, task: Task, size: int) -> Spec:
        changes = {
            "data.regression": task == "regression",
            "data.multilabel": task == "multilabel",
            "data.num_values" if task == "regression" else "data.num_classes": size,
            "training.loss": TASKS[task].default_loss().name,  # replaced below, but must fit the data
        }
        model = ToyNetwork(probabilities=self.plugin.takes == "probabilities")
        return replace(toy_spec(toy_registry(self.plugin), changes), model=model, loss=self.plugin)

    @property
    def info(self) -> DataInfo:
        """Task and shapes of the data of the toy run."""
        assert self.spec.data.info is not None
        return self.spec.data.info

    @cached_property
    def outputs(self) -> Tensor:
        """Network outputs (M, B, C) of the type that the loss takes, float64."""
        size = self.plugin.num_outputs(self.info)
        outputs = torch.randn(MEMBERS, BATCH, size, generator=generator(0, "contract", "outputs"), dtype=torch.float64)
        return outputs.softmax(dim=-1) if self.plugin.takes == "probabilities" else outputs

    @cached_property
    def target(self) -> Tensor:
        """Targets of B samples."""
        random = generator(0, "contract", "target")
        if self.info.task == "multilabel":
            return torch.randint(2, (BATCH, self.info.num_outputs), generator=random).double()
        if self.info.task == "regression":
            return torch.randn(BATCH, self.info.num_outputs, generator=random, dtype=torch.float64)
        return torch.randint(self.info.num_outputs, (BATCH,), generator=random)

    @check("it returns one loss per sample for every dtype and device")
    def per_sample(self) -> None:
        """(B, C) → (B,) and (M, B, C) → (M, B), never reduced over samples."""
        for device in ("cpu", "meta"):
            for dtype in (torch.float32, torch.float64):
                for outputs in (self.outputs, self.outputs[0]):
                    self._check_result(outputs.to(device, dtype))

    def _check_result(self, outputs: Tensor) -> None:
        target = self.target.to(outputs.device)
        target = target.to(outputs.dtype) if target.is_floating_point() else target
        with works_on_meta(outputs.device, self.plugin_class, "per_sample"):
            losses = self.plugin(outputs, target)
        expected = outputs.new_empty(outputs.shape[:-1])
        if describe(losses) != describe(expected):
            raise self.violation(
                f"{describe(expected)} for outputs of {describe(outputs)}",
                describe(losses),
                "per_sample",
                "reduce over the last dimension only, and keep the dtype and device of the outputs",
            )

    @check("a sample's loss does not depend on the other samples", needs=[per_sample])
    def independent_samples(self) -> None:
        """The diversity term differentiates the sum of all losses and attributes the result to single samples."""
        together = self.plugin(self.outputs, self.target)
        single = [self.plugin(self.outputs[:, [index]], self.target[[index]]) for index in range(BATCH)]
        if wrong := mismatch(torch.cat(single, dim=-1), together, 1e-9):
            raise self.violation("the same losses for single samples as for the whole batch", wrong, "per_sample")

    @check("its gradients are correct and finite", needs=[per_sample])
    def gradients(self) -> None:
        """Autograd agrees with central differences."""
        analytical, numerical = gradient_pair(lambda outputs: self.plugin(outputs, self.target).sum(), self.outputs)
        if not bool(analytical.isfinite().all()):
            got = f"{int((~analytical.isfinite()).sum())} entries that are not finite"
            raise self.violation("finite gradients", got, "per_sample")
        if wrong := mismatch(analytical, numerical, 1e-5):
            raise self.violation("the gradient by central differences in float64", wrong, "per_sample")

    @check("its declared second derivative is correct", needs=[per_sample])
    def second_derivative(self) -> None:
        """`quadratic_form`, which exact GNCL and the diversity of every report use, agrees with second differences."""
        if not self.plugin.twice_differentiable:
            return
        at, target = self.outputs[0], self.target
        direction = torch.randn(at.shape, generator=generator(0, "contract", "direction"), dtype=at.dtype)
        if self.plugin.takes == "probabilities":
            # rows that sum to 0 and are short: the points on both sides are probabilities too
            direction = (direction - direction.mean(dim=-1, keepdim=True)) / 20
        curvature = self.plugin.quadratic_form(at, target, direction)
        ahead, here, behind = (self.plugin(at + step * direction, target) for step in (STEP, 0.0, -STEP))
        if wrong := mismatch(curvature, (ahead - 2 * here + behind) / STEP**2, 1e-4):
            declared = self.plugin_class.quadratic_form is not Loss.quadratic_form
            raise self.violation(
                "the second derivative along a direction by finite differences",
                wrong,
                "quadratic_form" if declared else "per_sample",
                "fix quadratic_form(), or remove it; set twice_differentiable = False if there is no second derivative",
            )

    @check("its probabilities sum to one", needs=[per_sample])
    def probabilities(self) -> None:
        """A loss for classification turns outputs into probabilities, which metrics and predictions use."""
        if self.plugin.takes == "values":
            return
        result = self.plugin.probabilities(self.outputs)
        classes = self.info.num_outputs
        if describe(result) != describe(self.outputs.new_empty(MEMBERS, BATCH, classes)):
            raise self.violation(f"probabilities of shape (..., {classes})", describe(result), "probabilities")
        sums = result.sum(dim=-1)
        if self.plugin.takes == "labels":
            sums = torch.ones_like(sums)  # each label has its own probability
        if bool((result < 0).any()) or bool((result > 1 + 1e-9).any()) or mismatch(sums, torch.ones_like(sums), 1e-9):
            got = f"sums from {float(sums.min()):.4g} to {float(sums.max()):.4g}, smallest {float(result.min()):.4g}"
            raise self.violation("probabilities of at least 0 that sum to 1", got, "probabilities")
        if wrong := mismatch(self.plugin.log_probabilities(self.outputs).exp(), result, 1e-9):
            raise self.violation("the logarithm of probabilities()", f"after exp(), {wrong}", "log_probabilities")

    @check("the parts of its outputs add up", needs=[per_sample])
    def slices(self) -> None:
        """Hooks find each part of the outputs by its name in `named`."""
        num_outputs = self.plugin.num_outputs(self.info)
        sizes = dict(self.plugin.slices(num_outputs))
        if sizes and (min(sizes.values()) < 1 or sum(sizes.values()) != num_outputs):
            raise self.violation(
                f"sizes of at least 1 that add up to the {num_outputs} outputs of num_outputs()",
                f"{sizes}, {sum(sizes.values())} in all",
                "slices",
                "name every part of the outputs, or return {}",
            )

    @check("its point prediction has a value for each target", needs=[per_sample])
    def point(self) -> None:
        """Metrics of regression and `predict` use the point prediction."""
        if self.info.task != "regression":
            return
        for outputs in (self.outputs, self.outputs[0], self.outputs.float()):
            expected = outputs.new_empty(*outputs.shape[:-1], self.info.num_outputs)
            result = self.plugin.point(outputs)
            if describe(result) != describe(expected):
                fix = "select or compute one value for each target from the last dimension of the outputs"
                what = f"{describe(expected)} for outputs of {describe(outputs)}"
                raise self.violation(what, describe(result), "point", fix)

    @check("its outputs can be converted to other units", needs=[point])
    def rescale(self) -> None:
        """Networks learn standardised targets; predictions and kept outputs are in the original units."""
        if self.info.task != "regression":
            return
        outputs, values = self.outputs, torch.arange(1.0, self.info.num_outputs + 1, dtype=torch.float64)
        scale, shift = 10 * values, 100 * values
        fix = "convert() takes values of the targets (..., T): apply it to each such part of the outputs"
        try:
            rescaled = self.plugin.rescale(outputs, lambda part: part * scale + shift)
            back = self.plugin.rescale(rescaled, lambda part: (part - shift) / scale)
        except RuntimeError as error:  # convert() got another number of values
            expected = f"convert() to be called with {self.info.num_outputs} values of the targets"
            raise self.violation(expected, first_line(error), "rescale", fix) from error
        if wrong := mismatch(back, outputs, 1e-9):
            raise self.violation("the same outputs after a conversion and its inverse", wrong, "rescale", fix)
        if wrong := mismatch(self.plugin.point(rescaled), self.plugin.point(outputs) * scale + shift, 1e-9):
            raise self.violation("the point prediction in other units", wrong, "rescale", fix)

    @check("a run with it trains", needs=[per_sample, gradients, probabilities, point, rescale])
    def training(self) -> None:
        """One epoch through the ordinary training path, with this loss and its parameters."""
        train_toy_run(self.spec, toy_registry(self.plugin))
