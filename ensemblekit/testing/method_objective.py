"""The checks of a method's objective as a whole: its gradients, one member, the order of samples, separability."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ensemblekit.core.plugin import Method
from ensemblekit.core.seeds import generator
from ensemblekit.testing.checks import check
from ensemblekit.testing.method_fixture import BATCH, MethodFixture
from ensemblekit.testing.method_hooks import HookChecks
from ensemblekit.testing.numeric_gradients import gradient_pair
from ensemblekit.testing.reviews import mismatch

ROUNDING = 1e-9
"""Relative tolerance for sums in another order, in float64."""
LOSS_HOOKS = ("member_loss", "ensemble_loss")
NEEDS = (HookChecks.usable_hooks, HookChecks.pure_hooks)


class ObjectiveChecks(MethodFixture):
    """The checks of the objective that a method's hooks make up."""

    @check("gradients are finite", needs=NEEDS)
    def finite_gradients(self) -> None:
        """Even where roots, norms and logarithms have none: for equal members and for very confident ones."""
        ordinary, target = self.outputs().float(), self.target(torch.float32)
        points = {
            "ordinary outputs": ordinary,
            "members with equal outputs": ordinary[:1].expand_as(ordinary).clone(),
            "outputs that are all zero": torch.zeros_like(ordinary),
            "outputs of size 100": 100 * ordinary.sign(),
        }
        for name, point in points.items():
            value, gradient = _value_and_gradient(lambda outputs: self.objective(outputs, target), point)
            if bool(value.isfinite()) and bool(gradient.isfinite().all()):
                continue
            bad = f"{int((~gradient.isfinite()).sum())} entries of the gradient are"
            raise self.violation(
                f"a finite objective and gradient for {name}",
                f"{bad if bool(value.isfinite()) else 'the objective is'} not finite",
                self.faulty_hook(partial(_is_not_finite, point=point)),
                "look for log, sqrt, norm or division at 0; a small constant inside helps, a clamp afterwards does not",
            )

    @check("gradients match finite differences", needs=NEEDS)
    def correct_gradients(self) -> None:
        """Autograd agrees with central differences in float64; detached values are constants in both."""
        outputs, target = self.outputs(), self.target()
        analytical, numerical = gradient_pair(lambda leaf: self.objective(leaf, target), outputs)
        if wrong := mismatch(analytical, numerical, 1e-5):
            raise self.violation(
                "the gradient by central differences in float64",
                f"d objective / d outputs is {wrong} (member, sample, output)",
                self.faulty_hook(lambda summed: bool(mismatch(*gradient_pair(summed, outputs), 1e-5))),
                "look for a custom backward, in-place changes, or values that went through NumPy or Python numbers",
            )
        for hook in self.implemented(LOSS_HOOKS):
            losses = self.result(hook, outputs.clone().requires_grad_(), target)
            if losses is not None and not losses.requires_grad and bool(losses.any()):
                raise self.violation(
                    "a loss with a gradient, or zeros",
                    "a constant: no gradient flows from it to the outputs",
                    hook,
                    "compute it from outputs or combined, not from their detach() and not under torch.no_grad()",
                )
        if not bool(analytical.any()):
            hooks = self.implemented((*LOSS_HOOKS, "select_members"))
            raise self.violation(
                "an objective from which some member learns",
                "a gradient that is zero everywhere",
                hooks[0] if hooks else "",
                "return losses that depend on outputs, not on outputs.detach()",
            )

    @check("it works with one member", needs=NEEDS)
    def one_member(self) -> None:
        """A single member is a valid ensemble, unless the method's parameters or `check_spec` exclude it."""
        start = self.objective.hooks.call.members_at_start(num_members=self.members)
        if start != 1 and (self.plugin.required_members() not in (None, 1) or not self.accepts_members(1)):
            return
        outputs, target, objective = self.outputs(1), self.target(), self.objective_of(1)
        value, gradient = _value_and_gradient(lambda leaf: objective(leaf, target), outputs)
        combined = objective.combine(outputs)
        if not all(bool(numbers.isfinite().all()) for numbers in (value, gradient, combined)):
            bad = int((~gradient.isfinite()).sum())
            raise self.violation(
                "finite numbers for M = 1",
                f"objective {float(value):.4g}, {bad} entries of its gradient that are not finite",
                self.faulty_hook(partial(_is_not_finite, point=outputs)),
                "a sum over the other members is empty: divide by max(num_members - 1, 1)",
            )

    @check("the order of samples does not matter", needs=NEEDS)
    def sample_order(self) -> None:
        """The objective is a mean over samples: a permutation of the batch permutes the results."""
        outputs, target = self.outputs(), self.target()
        order = torch.arange(BATCH - 1, -1, -1)
        for hook in self.implemented():
            plain, moved = self.result(hook, outputs, target), self.result(hook, outputs[:, order], target[order])
            if plain is None or moved is None:
                continue
            # the dimension of the batch is the last one, but for outputs (B, C)
            dim = 0 if hook == "combine" else plain.ndim - 1
            expected = plain if plain.shape[dim] == 1 else plain.index_select(dim, order)
            if wrong := mismatch(moved.double(), expected.double(), ROUNDING):
                raise self.violation(
                    "the same result for a sample at every position in the batch",
                    f"with the samples in reverse order, {wrong}",
                    hook,
                    "do not use the position of a sample; sums over the batch are allowed",
                )

    @check("a separable objective is the sum over its members", needs=NEEDS)
    def separable(self) -> None:
        """Engines compute the members of a separable objective one by one, so their parts must add up to the whole."""
        if not self.objective.separable:
            return
        outputs, target = self.outputs(), self.target()
        random = generator(0, "contract", "weights")
        weights = torch.rand(BATCH, self.members, generator=random, dtype=torch.float64)
        whole, gradient = _value_and_gradient(lambda leaf: self.objective(leaf, target, weights), outputs)
        parts, slices = [], []
        for member in range(self.members):
            column = weights[:, member : member + 1]
            part_of = partial(self.objective, target=target, weights=column, ensemble_size=self.members)
            part, piece = _value_and_gradient(part_of, outputs[member : member + 1])
            parts.append(part)
            slices.append(piece)
        wrong_value = mismatch(torch.stack(parts).sum(), whole, ROUNDING)
        wrong_gradient = mismatch(torch.cat(slices), gradient, ROUNDING)
        if wrong_value or wrong_gradient:
            declared = self.plugin_class.separable is not Method.separable
            raise self.violation(
                "parts of the objective, each computed from one member's outputs (1, B, C), that add up to the whole",
                f"a sum of {wrong_value}" if wrong_value else f"a gradient of {wrong_gradient}",
                "separable" if declared else "combine",
                "let separable() return False, or use num_members for M instead of len(outputs)",
            )

    @check("linear terms agree with the hooks", needs=NEEDS)
    def linear(self) -> None:
        """Where a method says that its objective is linear in losses, training uses their formula instead of hooks."""
        outputs, target = self.outputs(), self.target()
        random = generator(0, "contract", "weights")
        weights = torch.rand(BATCH, self.members, generator=random, dtype=torch.float64)
        value, gradient = _value_and_gradient(lambda leaf: self.objective(leaf, target, weights), outputs)
        quick_value, quick_gradient = self.objective.value_and_gradient(outputs, target, weights)
        wrong = mismatch(quick_value, value, ROUNDING) or mismatch(quick_gradient, gradient, ROUNDING)
        if wrong:
            raise self.violation(
                "the objective and the gradient that the hooks give",
                f"linear_terms gives {wrong}",
                "linear_terms",
                "correct it, or let it return None",
            )


def _value_and_gradient(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """The value and gradient of a scalar function; the gradient of a constant is zero."""
    leaf = point.clone().requires_grad_()
    value = function(leaf)
    if not value.requires_grad:
        return value, torch.zeros_like(point)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(point) if gradient is None else gradient


def _is_not_finite(function: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    value, gradient = _value_and_gradient(function, point)
    return not (bool(value.isfinite()) and bool(gradient.isfinite().all()))
