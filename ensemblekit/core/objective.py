"""The objective of an ensemble: calls the hooks of the methods, checks what they return, and sums it to one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.closed_form import linear_terms_of, linear_value_and_gradient
from ensemblekit.core.errors import DataError, NumericError, PluginError
from ensemblekit.core.hooks import PredictionDefaults, RunHooks, describe_value, not_finite
from ensemblekit.core.losses import Loss
from ensemblekit.core.member_hooks import MemberHooks
from ensemblekit.core.member_losses import MemberLosses
from ensemblekit.core.misuse import refuses_misuse
from ensemblekit.core.outputs import OutputLayout
from ensemblekit.core.plugin import Averages, Combination, Method, Plugin
from ensemblekit.core.verification import implemented_hooks

COUPLING_HOOKS = {"member_loss", "ensemble_loss", "select_members"}
"""Hooks in which the outputs of several members may meet."""
COMBINING_HOOKS = ("combine", "fit_combiner")


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


@dataclass(frozen=True)
class Mix:
    """Samples that are mixtures of two: their objective is that of both targets, by their shares."""

    partner: Tensor
    """Index in the batch of the other sample, int64 (B,)."""
    share: Tensor
    """Share of the sample itself, 0 to 1 (B,)."""


class Objective:
    """The objective of some methods under one loss: (outputs, target) → scalar.

    Nothing here reads a value back from the device, except `check_finite`, which is called once the scalar has turned
    out not to be finite.

    Args:
        methods: composed in this order; an empty list trains the members independently.
        loss: the per-sample loss that the methods build on.
        extensions: plugins that follow the life cycle.
        listeners: other objects that do.
        layout: what the rows and columns of the outputs mean. Default: they are the members' predictions.
        combiner: the plugin that combines the members' outputs in predictions. Default: the methods do, else the loss.
        member_losses: the loss of each member by its index, if they differ.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        loss: Loss,
        extensions: Iterable[Plugin] = (),
        listeners: Iterable[object] = (),
        layout: OutputLayout | None = None,
        combiner: Plugin | None = None,
        member_losses: Sequence[Loss] = (),
    ) -> None:
        self.methods, self.loss, self.layout = tuple(methods), loss, layout
        self.hooks = RunHooks([*methods, *extensions], listeners)
        self.final_hooks = self.hooks
        if combiner is not None or type(loss).mixture is not Loss.mixture:
            self.final_hooks = RunHooks([*methods, *([combiner] if combiner else [])], defaults=PredictionDefaults)
        """Those that combine the outputs of a prediction."""
        self.combiner = combiner
        self.members = MemberHooks(self.hooks)
        self.member_losses = MemberLosses(loss, member_losses) if member_losses else None

    @cached_property
    def separable(self) -> bool:
        """Whether each member's term depends on its own outputs alone, so that members can be trained one by one."""
        if self.layout is not None and self.layout.auxiliary:
            return False
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
    def predictor(self) -> str | None:
        """The name of the auxiliary group that predicts alone; None if the members predict."""
        return next((name for method in self.methods if (name := method.predictor()) is not None), None)

    @cached_property
    def predicts_with_auxiliary(self) -> bool:
        """Whether predictions need the outputs of auxiliary networks beside those of the members."""
        return self.predictor is None and self.final_hooks.names("auxiliary", COMBINING_HOOKS)

    @cached_property
    def combines_more(self) -> bool:
        """Whether the combination needs more than the members' predictions."""
        return self.predicts_with_auxiliary or self.final_hooks.names("named", COMBINING_HOOKS)

    @cached_property
    def averages(self) -> Averages | None:
        """What the combined prediction is the plain mean of, over the members; None if it is another combination."""
        if self.predictor is not None:
            return None
        if isinstance(self.combiner, Combination):
            return self.combiner.averages
        by_method = any(hook in implemented_hooks(type(method)) for method in self.methods for hook in COMBINING_HOOKS)
        return None if by_method else "outputs"

    @cached_property
    def prediction_layout(self) -> OutputLayout | None:
        """What the rows and columns of the outputs mean in a prediction, where not all networks may run."""
        if self.layout is None:
            return None
        if self.predictor is not None:
            return OutputLayout(self.layout.num_outputs, self.layout.slices)
        return self.layout if self.predicts_with_auxiliary else self.layout.without_auxiliary()

    def predictions(self, outputs: Tensor, passes: int = 1) -> Tensor:
        """Return the members' predictions (M, B, C) among the outputs of a prediction; (S · M, B, C) of S passes."""
        layout = self.prediction_layout
        if layout is None:
            return outputs
        parts = [layout.predictions(one_pass) for one_pass in outputs.chunk(max(passes, 1))]
        return torch.cat(parts) if passes > 1 else parts[0]

    def train_predictions(self, outputs: Tensor) -> Tensor:
        """Return the members' predictions (M, B, C) among the outputs of a training step."""
        return outputs if self.layout is None else self.layout.predictions(outputs)

    @refuses_misuse
    def combine(self, outputs: Tensor, members: Tensor | None = None) -> Tensor:
        """Combine the outputs in training to the ensemble's output (B, C), as the methods do.

        Args:
            outputs: all outputs (R, B, W): without a layout those of the members (M, B, C).
            members: the indices of the members in the spec (M,); None: 0, 1, 2 …
        """
        return self._combine(self.hooks, self.output_arguments(outputs, members, self.layout) | {"fitted": None})

    @refuses_misuse
    def predict(
        self, outputs: Tensor, fitted: Tensor | None = None, passes: int = 1, members: Tensor | None = None
    ) -> Tensor:
        """Combine the outputs of a prediction to the ensemble's output (B, C).

        Args:
            outputs: those of the networks that predict (R, B, W), or (S · R, B, W) of S stochastic passes.
            fitted: parameters of the combination, if a plugin fits them.
            passes: the number S of stochastic passes.
            members: the indices of the members in the spec (M,); None: 0, 1, 2 …
        """
        if passes > 1:
            each = [self.predict(one_pass, fitted, members=members) for one_pass in outputs.chunk(passes)]
            return self.loss.mixture(torch.stack(each))
        arguments = self.output_arguments(outputs, members, self.prediction_layout)
        if self.predictor is not None:
            return self.loss.mixture(arguments["outputs"])
        return self._combine(self.final_hooks, arguments | {"fitted": fitted})

    def fit_combiner(self, outputs: Tensor, target: Tensor, members: Tensor | None = None) -> Tensor | None:
        """Fit the combination on the outputs (R, N, W) of a prediction for validation data; None if there is none."""
        if self.predictor is not None:
            return None
        arguments = self.output_arguments(outputs, members, self.prediction_layout)
        return self.final_hooks.fit_combiner(arguments | {"target": target})

    @refuses_misuse
    def __call__(
        self,
        outputs: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        ensemble_size: int | None = None,
        members: Tensor | None = None,
        moment: Moment = START,
        mix: Mix | None = None,
        importance: Tensor | None = None,
    ) -> Tensor:
        """Compute the objective of a batch.

        Args:
            outputs: all outputs (R, B, W): without a layout the members' raw outputs (M, B, C).
            target: targets of the B samples.
            weights: sample weights (B, M), or None for 1.
            ensemble_size: the number of all members, if `outputs` and `weights` are those of only some members of a
                separable objective. The terms of all members add up to the objective of the ensemble.
            members: the indices of the members in the spec (M,), on the device of the outputs; None: 0, 1, 2 …
            moment: when in training this is.
            mix: how samples were mixed; None: they were not.
            importance: how much the whole objective of each sample counts (B,); None: 1.

        Returns:
            A scalar.
        """
        if outputs.ndim != 3 or not outputs.is_floating_point():
            fix = "give floating-point member outputs of shape (M, B, C)"
            raise DataError(f"outputs are {describe_value(outputs)}", "the objective", fix)
        arguments = self.arguments(outputs, target, members, moment)
        arguments["num_members"] = ensemble_size or arguments["num_members"]
        per_sample = self._per_sample(arguments, weights)
        if importance is not None:
            per_sample = per_sample * importance.to(per_sample.dtype)
        if mix is not None:
            other = self._per_sample(arguments | {"target": target[mix.partner]}, weights)
            if importance is not None:
                other = other * importance[mix.partner].to(other.dtype)
            per_sample = mix.share * per_sample + (1 - mix.share) * other
        if outputs.requires_grad and not per_sample.requires_grad:
            what = f"nothing can be learned: the losses that {self._names} returns do not depend on the outputs"
            raise PluginError(what, "member_loss and ensemble_loss", "remove detach(), no_grad() or item() from them")
        return per_sample.mean()

    def value_and_gradient(
        self,
        outputs: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        ensemble_size: int | None = None,
        members: Tensor | None = None,
        moment: Moment = START,
        mix: Mix | None = None,
        importance: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the objective of a batch like a call, and its gradient (R, B, W) with respect to the outputs.

        Where the objective is linear in losses that know their gradient, no hook is called.
        """
        terms = self._linear_terms(ensemble_size or len(outputs)) if self._linear_terms and mix is None else None
        if terms is not None and (ensemble_size is None or not terms[1]):
            if weights is not None:
                _check_weights(weights, (outputs.shape[1], len(outputs)))
            prepared = self.loss.prepare(outputs, target)
            return linear_value_and_gradient(terms, self.loss, outputs.detach(), prepared, weights, importance)
        leaf = outputs.detach().requires_grad_()
        value = self(leaf, target, weights, ensemble_size, members, moment, mix, importance)
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    @cached_property
    def _linear_terms(self) -> Callable[[int], tuple[float, float] | None] | None:
        """Factors of the losses in an objective that is linear in them; None if outputs are more than predictions."""
        has_more = self.layout is not None and (self.layout.auxiliary or self.layout.extras)
        return None if has_more or self.member_losses else linear_terms_of(self.methods, self.loss)

    def _per_sample(self, arguments: dict[str, Any], weights: Tensor | None) -> Tensor:
        """Compute the objective of each sample (B,)."""
        outputs: Tensor = arguments["outputs"]
        num_members, batch = outputs.shape[:2]
        member_loss = self.hooks.call.member_loss(**arguments)
        self.hooks.check_result("member_loss", member_loss, (num_members, batch), outputs, **arguments)
        for mask in self._masks(arguments):
            # `where` and not a product: the loss of a member that is left out may be infinite
            member_loss = torch.where(mask, member_loss, 0) if mask.dtype == torch.bool else member_loss * mask
        if weights is not None:
            _check_weights(weights, (batch, num_members))
            member_loss = member_loss * weights.T.to(outputs.dtype)
        per_sample: Tensor = member_loss.sum(dim=0)
        ensemble_loss = self.hooks.call.ensemble_loss(**arguments)
        if ensemble_loss is not None:
            self.hooks.check_result("ensemble_loss", ensemble_loss, (batch,), outputs, **arguments)
            per_sample = per_sample + ensemble_loss
        return per_sample

    @property
    def _names(self) -> str:
        return ", ".join(f'"{method.name}"' for method in self.methods)

    def check_finite(self, outputs: Tensor, target: Tensor) -> None:
        """Raise a `NumericError` that names the member, or the plugin and hook, whose values are not finite."""
        if outputs.is_meta:
            return
        arguments = self.arguments(outputs, target) | {"fitted": None}
        outputs = arguments["outputs"]
        for member, finite in enumerate(outputs.isfinite().flatten(1).all(dim=1).tolist()):
            if not finite:
                raise NumericError(f"the outputs of member {member} are not finite", fix="lower the learning rate")
        if problem := self.loss.output_problem(outputs):
            fix = 'train a model that ends with a softmax, or use loss = "cross_entropy"'
            raise NumericError(problem, f'the loss "{self.loss.name}"', fix)
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

    def output_arguments(self, outputs: Tensor, members: Tensor | None, layout: OutputLayout | None) -> dict[str, Any]:
        """Return the arguments of hooks that outputs alone determine; those of a prediction have another layout."""
        layout = layout or OutputLayout(outputs.shape[-1], self.loss.slices(outputs.shape[-1]))
        split = layout.split(outputs)
        indices = torch.arange(len(split.predictions), device=outputs.device) if members is None else members
        return {
            "outputs": split.predictions,
            "loss": self.loss if self.member_losses is None else self.member_losses.of(indices),
            "num_members": len(split.predictions),
            "members": indices,
            "named": split.named,
            "auxiliary": split.auxiliary,
        }

    def arguments(
        self, outputs: Tensor, target: Tensor, members: Tensor | None = None, moment: Moment = START
    ) -> dict[str, Any]:
        """Return the arguments of the hooks of the objective; `outputs` as in a call."""
        arguments = self.output_arguments(outputs, members, self.layout)
        return {
            **arguments,
            "combined": self._combine(self.hooks, arguments | {"fitted": None}),
            "target": target,
            "epoch": moment.epoch,
            "num_epochs": moment.num_epochs,
            "progress": moment.progress,
        }

    @staticmethod
    def _combine(hooks: RunHooks, arguments: dict[str, Any]) -> Tensor:
        outputs: Tensor = arguments["outputs"]
        if arguments["fitted"] is None:
            combined: Tensor = hooks.call.combine(**arguments)
        else:  # what a plugin has fitted reaches that plugin alone
            combined = hooks.first_result("combine", **arguments)[1]
        hooks.check_result("combine", combined, outputs.shape[1:], outputs, **arguments)
        return combined

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
            raise self.hooks.violation("select_members", broadcasts, expected, **arguments)
        return masks


def _check_weights(weights: Tensor, shape: tuple[int, int]) -> None:
    if tuple(weights.shape) != shape:
        what = f"sample weights have shape {tuple(weights.shape)}"
        raise DataError(what, "the objective", f"give one per sample and member: {shape}")
