"""The contract of a loss: one value per sample that depends on this sample alone, with correct derivatives."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ensemblekit.core.losses import MSE, CrossEntropy, Loss
from ensemblekit.core.seeds import generator
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.numeric_gradients import gradient_pair
from ensemblekit.testing.reviews import describe, mismatch, works_on_meta
from ensemblekit.testing.toy_run import ToyNetwork, toy_registry, toy_spec, train_toy_run

MEMBERS, BATCH, CLASSES = 2, 4, 3
STEP = 1e-3
"""Step of the second difference: rounding in float64 and the truncation error are both about 1e-6."""


class LossContract(PluginContract[Loss]):
    """The checks of a loss."""

    kind = "loss"

    @cached_property
    def outputs(self) -> Tensor:
        """Network outputs (M, B, C) of the type that the loss takes, float64."""
        size = 1 if self.plugin.takes == "margins" else CLASSES
        outputs = torch.randn(MEMBERS, BATCH, size, generator=generator(0, "contract", "outputs"), dtype=torch.float64)
        return outputs.softmax(dim=-1) if self.plugin.takes == "probabilities" else outputs

    @cached_property
    def target(self) -> Tensor:
        """Targets of B samples."""
        random = generator(0, "contract", "target")
        if self.plugin.takes == "values":
            return torch.randn(BATCH, CLASSES, generator=random, dtype=torch.float64)
        return torch.randint(2 if self.plugin.takes == "margins" else CLASSES, (BATCH,), generator=random)

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
        classes = 2 if self.plugin.takes == "margins" else CLASSES
        if describe(result) != describe(self.outputs.new_empty(MEMBERS, BATCH, classes)):
            raise self.violation(f"probabilities of shape (..., {classes})", describe(result), "probabilities")
        sums = result.sum(dim=-1)
        if bool((result < 0).any()) or mismatch(sums, torch.ones_like(sums), 1e-9):
            got = f"sums from {float(sums.min()):.4g} to {float(sums.max()):.4g}, smallest {float(result.min()):.4g}"
            raise self.violation("probabilities of at least 0 that sum to 1", got, "probabilities")
        if wrong := mismatch(self.plugin.log_probabilities(self.outputs).exp(), result, 1e-9):
            raise self.violation("the logarithm of probabilities()", f"after exp(), {wrong}", "log_probabilities")

    @check("a run with it trains", needs=[per_sample, gradients, probabilities])
    def training(self) -> None:
        """One epoch through the ordinary training path, with this loss and its parameters."""
        registry = toy_registry(self.plugin)
        regression = self.plugin.takes == "values"
        changes = {
            "data.regression": regression,
            "data.num_classes": 2 if self.plugin.takes == "margins" else CLASSES,
            "training.loss": (MSE() if regression else CrossEntropy()).name,  # replaced below, but must fit the data
        }
        model = ToyNetwork(probabilities=self.plugin.takes == "probabilities")
        train_toy_run(replace(toy_spec(registry, changes), model=model, loss=self.plugin), registry)
