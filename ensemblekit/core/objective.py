"""The objective of an ensemble: calls the hooks of the methods, checks what they return, and sums it to one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError, NumericError, PluginError
from ensemblekit.core.hooks import RunHooks, describe_value, not_finite, violation
from ensemblekit.core.losses import Loss
from ensemblekit.core.misuse import refuses_misuse
from ensemblekit.core.plugin import Method, Plugin
from ensemblekit.core.verification import implemented_hooks

COUPLING_HOOKS = {"member_loss", "ensemble_loss", "select_members"}
"""Hooks in which the outputs of several members may meet."""


@dataclass(frozen=True)
class Moment:
    """A moment of training, which objectives may depend on."""

    epoch: int = 1
    """Counted from 1."""
    num_epochs: int = 1
    progress: float = 0.0
    """The share of the training that is done, 0 ≤ progress < 1."""


START = Moment()
"""The beginning of training."""


class Objective:
    """The objective of some methods under one loss: (outputs, target) → scalar.

    Nothing here reads a value back from the device, except `check_finite`, which is called once the scalar has turned
    out not to be finite.

    Args:
        methods: composed in this order; an empty list trains the members independently.
        loss: the per-sample loss that the methods build on.
        extensions: plugins that follow the life cycle.
        listeners: other objects that do.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        loss: Loss,
        extensions: Iterable[Plugin] = (),
        listeners: Iterable[object] = (),
    ) -> None:
        self.methods = tuple(methods)
        self.loss = loss
        self.hooks = RunHooks([*methods, *extensions], listeners)

    @cached_property
    def separable(self) -> bool:
        """Whether each member's term depends on its own outputs alone, so that members can be trained one by one."""
        return all(
            not COUPLING_HOOKS & set(implemented_hooks(type(method))) if declared is None else declared
            for method in self.methods
            for declared in (method.separable(),)
        )

    @property
    def needs_frozen_members(self) -> bool:
        """Whether the outputs of frozen members are part of the objective."""
        return all(method.needs_frozen_members for method in self.methods)

    @cached_property
    def has_second_pass(self) -> bool:
        """Whether members also learn from inputs that are derived from those of the batch."""
        return self.hooks.is_implemented("second_inputs")

    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the inputs of the second pass; (B, …), or (K, B, …) for K members, like both arguments."""
        arguments = {"inputs": inputs, "gradient": gradient}
        second = self.hooks.call.second_inputs(**arguments)
        self._check_result("second_inputs", second, tuple(inputs.shape), inputs, arguments)
        return second.detach()

    @refuses_misuse
    def combine(
        self, outputs: Tensor, fitted: Tensor | None = None, passes: int = 1, members: Tensor | None = None
    ) -> Tensor:
        """Combine the outputs (M, B, C), or (S · M, B, C) of S stochastic passes, to the ensemble's output (B, C).

        Args:
            outputs: those of the members.
            fitted: parameters of the combination, if a method fits them.
            passes: the number S of stochastic passes.
            members: the indices of the members in the spec (M,); None: 0, 1, 2 …
        """
        if passes > 1:
            each = [self.combine(one_pass, fitted, members=members) for one_pass in outputs.chunk(passes)]
            return torch.stack(each).mean(dim=0)
        arguments = self._output_arguments(outputs, members) | {"fitted": fitted}
        combined = self.hooks.first_result("combine", **arguments)[1]
        self._check_result("combine", combined, tuple(outputs.shape[1:]), outputs, arguments)
        return combined

    @refuses_misuse
    def __call__(
        self,
        outputs: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        ensemble_size: int | None = None,
        members: Tensor | None = None,
        moment: Moment = START,
    ) -> Tensor:
        """Compute the objective of a batch.

        Args:
            outputs: raw member outputs (M, B, C).
            target: targets of the B samples.
            weights: sample weights (B, M), or None for 1.
            ensemble_size: the number of all members, if `outputs` and `weights` are those of only some members of a
                separable objective. The terms of all members add up to the objective of the ensemble.
            members: the indices of the members in the spec (M,), on the device of the outputs; None: 0, 1, 2 …
            moment: when in training this is.

        Returns:
            A scalar.
        """
        if outputs.ndim != 3 or not outputs.is_floating_point():
            fix = "give floating-point member outputs of shape (M, B, C)"
            raise DataError(f"outputs are {describe_value(outputs)}", "the objective", fix)
        num_members, batch = outputs.shape[:2]
        arguments = self.arguments(outputs, target, members, moment)
        arguments["num_members"] = ensemble_size or num_members
        member_loss = self.hooks.call.member_loss(**arguments)
        self._check_result("member_loss", member_loss, (num_members, batch), outputs, arguments)
        for mask in self._masks(arguments):
            # `where` and not a product: the loss of a member that is left out may be infinite
            member_loss = torch.where(mask, member_loss, 0) if mask.dtype == torch.bool else member_loss * mask
        if weights is not None:
            _check_weights(weights, (batch, num_members))
            member_loss = member_loss * weights.T.to(outputs.dtype)
        per_sample = member_loss.sum(dim=0)
        ensemble_loss = self.hooks.call.ensemble_loss(**arguments)
        if ensemble_loss is not None:
            self._check_result("ensemble_loss", ensemble_loss, (batch,), outputs, arguments)
            per_sample = per_sample + ensemble_loss
        if outputs.requires_grad and not per_sample.requires_grad:
            names = ", ".join(f'"{method.name}"' for method in self.methods)
            what = f"nothing can be learned: the losses that {names} returns do not depend on the outputs"
            raise PluginError(what, "member_loss and ensemble_loss", "remove detach(), no_grad() or item() from them")
        return per_sample.mean()

    def check_finite(self, outputs: Tensor, target: Tensor) -> None:
        """Raise a `NumericError` that names the member, or the plugin and hook, whose values are not finite."""
        if outputs.is_meta:
            return
        for member, finite in enumerate(outputs.isfinite().flatten(1).all(dim=1).tolist()):
            if not finite:
                raise NumericError(f"the outputs of member {member} are not finite", fix="lower the learning rate")
        if problem := self.loss.output_problem(outputs):
            fix = 'train a model that ends with a softmax, or use loss = "cross_entropy"'
            raise NumericError(problem, f'the loss "{self.loss.name}"', fix)
        arguments = self.arguments(outputs, target) | {"fitted": None}
        for hook in ("combine", "member_loss", "ensemble_loss", "select_members"):
            for name, result in self.hooks.results(hook, **arguments):
                if not bool(result.isfinite().all()):
                    if hook in ("member_loss", "ensemble_loss"):
                        self._check_loss(outputs, arguments["combined"], target)
                    fix = "check its formula for log, division or exp of extreme outputs"
                    raise not_finite(name, hook, f'with the loss "{self.loss.name}"', fix)
                if hook != "select_members":
                    break  # only the first result counts

    def _check_loss(self, outputs: Tensor, combined: Tensor, target: Tensor) -> None:
        """Raise a `NumericError` if the loss itself, of a member or of the combined output, is not finite."""
        labels = [*(f"member {member}" for member in range(len(outputs))), "the combined output"]
        for label, one in zip(labels, [*outputs, combined], strict=True):
            finite = self.loss(one, target).isfinite()
            if not bool(finite.all()):
                sample = int((~finite).nonzero()[0])
                what = f'the loss "{self.loss.name}" of {label} is not finite for sample {sample} of the batch'
                fix = "lower the learning rate"
                if self.loss.takes == "probabilities":
                    fix = 'the true class has probability 0: use loss = "cross_entropy" and a model without softmax'
                raise NumericError(what, fix=fix)

    def _output_arguments(self, outputs: Tensor, members: Tensor | None) -> dict[str, Any]:
        """Return the arguments of hooks that outputs alone determine."""
        indices = torch.arange(len(outputs), device=outputs.device) if members is None else members
        return {
            "outputs": outputs,
            "loss": self.loss,
            "num_members": len(outputs),
            "members": indices,
            "named": {},
            "auxiliary": {},
        }

    def arguments(
        self, outputs: Tensor, target: Tensor, members: Tensor | None = None, moment: Moment = START
    ) -> dict[str, Any]:
        """Return the arguments of the hooks of the objective."""
        return {
            **self._output_arguments(outputs, members),
            "combined": self.combine(outputs, members=members),
            "target": target,
            "epoch": moment.epoch,
            "num_epochs": moment.num_epochs,
            "progress": moment.progress,
        }

    def _masks(self, arguments: dict[str, Any]) -> list[Tensor]:
        outputs: Tensor = arguments["outputs"]
        masks: list[Tensor] = self.hooks.call.select_members(**arguments)

        def broadcasts(mask: object) -> bool:
            if not isinstance(mask, Tensor) or mask.device != outputs.device or mask.ndim > 2:
                return False
            if mask.dtype != torch.bool and not mask.is_floating_point():
                return False  # integers are most likely indices
            sizes = zip(reversed(mask.shape), reversed(outputs.shape[:2]), strict=False)
            return all(size in (1, full) for size, full in sizes)

        if not all(broadcasts(mask) for mask in masks):
            shape = tuple(outputs.shape[:2])
            expected = f"a boolean or floating-point mask that broadcasts to {shape} on {outputs.device}"
            raise self._violation("select_members", arguments, broadcasts, expected)
        return masks

    def _check_result(
        self, hook: str, result: object, shape: tuple[int, ...], outputs: Tensor, arguments: dict[str, Any]
    ) -> None:
        def fits(result: object) -> bool:
            return (
                isinstance(result, Tensor)
                and tuple(result.shape) == shape
                and result.dtype == outputs.dtype
                and result.device == outputs.device
            )

        if not fits(result):
            expected = f"{str(outputs.dtype).removeprefix('torch.')} of shape {shape} on {outputs.device}"
            raise self._violation(hook, arguments, fits, expected)

    def _violation(
        self, hook: str, arguments: dict[str, Any], is_right: Callable[[object], bool], expected: str
    ) -> PluginError:
        """Find the plugin that returned a wrong value by calling each by itself; returns the error that names it."""
        wrong = ((name, result) for name, result in self.hooks.results(hook, **arguments) if not is_right(result))
        no_result = getattr(self.hooks.call, hook).get_hookimpls()[-1].plugin_name, None
        name, result = next(wrong, no_result)
        return violation(name, hook, expected, result)


def _check_weights(weights: Tensor, shape: tuple[int, int]) -> None:
    if tuple(weights.shape) != shape:
        what = f"sample weights have shape {tuple(weights.shape)}"
        raise DataError(what, "the objective", f"give one per sample and member: {shape}")
