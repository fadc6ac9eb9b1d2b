"""Calls the hooks of a run's methods, checks what they return, and sums it to one number.

This file is not called `objective.py` because ``ensemblekit.objective`` is the public function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from pluggy import HookImpl
from torch import Tensor

from ensemblekit.core.errors import DataError, NumericError, PluginError
from ensemblekit.core.hooks import hook_manager, implemented_hooks
from ensemblekit.core.losses import Loss
from ensemblekit.core.plugin import Method, Plugin
from ensemblekit.core.seeds import generator


class Objective:
    """The objective of a list of methods under one loss: (outputs, target) → scalar.

    Nothing here reads a value back from the device. `check_finite` does, and is for the time when
    the scalar has turned out not to be finite.
    """

    def __init__(self, methods: Sequence[Method], loss: Loss, extensions: Iterable[Plugin] = ()) -> None:
        self.methods = tuple(methods)
        self.loss = loss
        self.hooks = hook_manager([*methods, *extensions])

    @cached_property
    def separable(self) -> bool:
        """Whether every member's part depends on its own outputs alone; then `__call__` takes them in pieces."""
        coupling = {"member_loss", "ensemble_loss", "select_members"}
        answers = ((method.separable(), not coupling & set(implemented_hooks(type(method)))) for method in self.methods)
        return all(by_hooks if said is None else said for said, by_hooks in answers)

    @property
    def needs_frozen_members(self) -> bool:
        """Whether the outputs of members that no longer learn are part of it."""
        return all(method.needs_frozen_members for method in self.methods)

    @property
    def has_second_pass(self) -> bool:
        """Whether members also learn from inputs that are made from those of the batch."""
        return bool(self.hooks.hook.second_inputs.get_hookimpls())

    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """What the second pass starts from, of the shape of both arguments: (B, …), or (K, B, …) for K members."""
        arguments = {"inputs": inputs, "gradient": gradient}
        answer = self.hooks.hook.second_inputs(**arguments)
        self._check_tensor("second_inputs", answer, tuple(inputs.shape), inputs, arguments)
        return answer.detach()

    @property
    def fits_combiner(self) -> bool:
        """Whether held-out data decides how outputs are combined."""
        return bool(self.hooks.hook.fit_combiner.get_hookimpls())

    def fit_combiner(self, outputs: Tensor, target: Tensor) -> Tensor | None:
        """What `combine` takes as `fitted`, from the outputs (M, N, C) for held-out data; None if nobody needs it."""
        arguments = {"outputs": outputs, "target": target, "loss": self.loss, "num_members": len(outputs)}
        name, fitted = next(self._answers("fit_combiner", arguments), ("", None))
        if fitted is None:
            return None
        if not isinstance(fitted, Tensor) or not fitted.is_floating_point() or fitted.device != outputs.device:
            raise _contract_broken(name, "fit_combiner", f"a floating-point tensor on {outputs.device}", fitted)
        if not bool(fitted.isfinite().all()):
            raise NumericError(f'plugin "{name}": hook "fit_combiner" returned a value that is not finite')
        return fitted

    def passes(self, num_members: int) -> int | None:
        """How many noisy passes each of so many networks makes in predictions; None: one, without noise."""
        name, passes = next(self._answers("passes", {"num_members": num_members}), ("", None))
        if passes is not None and (not isinstance(passes, int) or isinstance(passes, bool) or passes < 1):
            raise _contract_broken(name, "passes", "a whole number of at least 1", passes)
        return passes

    def combine(self, outputs: Tensor, fitted: Tensor | None = None, passes: int = 1) -> Tensor:
        """The ensemble's output (B, C) from the members' outputs (M, B, C), or from those of several passes in turn."""
        if passes > 1:
            return torch.stack([self.combine(own, fitted) for own in outputs.chunk(passes)]).mean(dim=0)
        arguments = {"outputs": outputs, "num_members": len(outputs), "fitted": fitted}
        combined = self.hooks.hook.combine(**arguments)
        self._check_tensor("combine", combined, tuple(outputs.shape[1:]), outputs, arguments)
        return combined

    def __call__(
        self, outputs: Tensor, target: Tensor, weights: Tensor | None = None, ensemble_size: int | None = None
    ) -> Tensor:
        """The objective of a batch: outputs (M, B, C), targets of B samples, weights (B, M) or None.

        If `ensemble_size` is given, `outputs` and `weights` are those of only some members of a separable
        objective; the parts of all members add up to the whole.
        """
        if outputs.ndim != 3 or not outputs.is_floating_point():
            raise DataError(
                f"outputs are {_form(outputs)}",
                "the objective",
                "give floating-point member outputs of shape (M, B, C)",
            )
        num_members, batch = outputs.shape[:2]
        arguments = self._arguments(outputs, target)
        arguments["num_members"] = ensemble_size or num_members
        member_loss = self.hooks.hook.member_loss(**arguments)
        self._check_tensor("member_loss", member_loss, (num_members, batch), outputs, arguments)
        for mask in self._masks(arguments):
            # `where` and not a product: a member that is left out may have an infinite loss
            member_loss = torch.where(mask, member_loss, 0) if mask.dtype == torch.bool else member_loss * mask
        if weights is not None:
            _check_weights(weights, (batch, num_members))
            member_loss = member_loss * weights.T.to(outputs.dtype)
        per_sample = member_loss.sum(dim=0)
        ensemble_loss = self.hooks.hook.ensemble_loss(**arguments)
        if ensemble_loss is not None:
            self._check_tensor("ensemble_loss", ensemble_loss, (batch,), outputs, arguments)
            per_sample = per_sample + ensemble_loss
        if outputs.requires_grad and not per_sample.requires_grad:
            names = ", ".join(f'"{method.name}"' for method in self.methods)
            what = f"nothing can be learnt: what the hooks of {names} return does not depend on the outputs"
            raise PluginError(what, "member_loss and ensemble_loss", "remove detach(), no_grad() or item() from them")
        return per_sample.mean()

    def sample_weights(self, num_samples: int, num_members: int, seed: int) -> Tensor | None:
        """The weights (N, M) of a run, drawn once from its seed; None if every sample counts the same."""
        product = None
        expected = (num_samples, num_members)
        for implementation in self.hooks.hook.sample_weights.get_hookimpls():
            # a generator for each, so that a method's draws do not depend on what it is combined with
            name = implementation.plugin_name
            source = generator(seed, "sample_weights", name)
            answer = _ask(implementation, {"num_samples": num_samples, "num_members": num_members, "generator": source})
            if answer is None:
                continue
            if not isinstance(answer, Tensor) or tuple(answer.shape) != expected or not answer.is_floating_point():
                raise _contract_broken(name, "sample_weights", f"floating-point of shape {expected}", answer)
            if not bool(answer.isfinite().all()):
                raise NumericError(f'plugin "{name}": hook "sample_weights" returned a value that is not finite')
            product = answer if product is None else product * answer
        return product

    def check_finite(self, outputs: Tensor, target: Tensor) -> None:
        """Raise an error that names the member, or the plugin and hook, whose numbers are not finite."""
        if outputs.is_meta:
            return
        for member, finite in enumerate(outputs.isfinite().flatten(1).all(dim=1).tolist()):
            if not finite:
                raise NumericError(f"the outputs of member {member} are not finite", fix="lower the learning rate")
        arguments = self._arguments(outputs, target) | {"fitted": None}
        for hook in ("combine", "member_loss", "ensemble_loss", "select_members"):
            for name, answer in self._answers(hook, arguments):
                if not bool(answer.isfinite().all()):
                    raise NumericError(
                        f'plugin "{name}": hook "{hook}" returned a value that is not finite',
                        f'with the loss "{self.loss.name}"',
                        "check its formula for log, division or exp of extreme outputs",
                    )
                if hook != "select_members":
                    break  # the others did not count

    def _arguments(self, outputs: Tensor, target: Tensor) -> dict[str, Any]:
        return {
            "outputs": outputs,
            "combined": self.combine(outputs),
            "target": target,
            "loss": self.loss,
            "num_members": len(outputs),
        }

    def _masks(self, arguments: dict[str, Any]) -> list[Tensor]:
        outputs: Tensor = arguments["outputs"]
        masks: list[Tensor] = self.hooks.hook.select_members(**arguments)

        def broadcasts(mask: object) -> bool:
            if not isinstance(mask, Tensor) or mask.device != outputs.device or mask.ndim > 2:
                return False
            if mask.dtype != torch.bool and not mask.is_floating_point():
                return False  # whole numbers are most likely indices
            pairs = zip(reversed(mask.shape), reversed(outputs.shape[:2]), strict=False)
            return all(size in (1, full) for size, full in pairs)

        if not all(broadcasts(mask) for mask in masks):
            shape = tuple(outputs.shape[:2])
            expected = f"a boolean or floating-point mask that broadcasts to {shape} on {outputs.device}"
            raise self._blame("select_members", arguments, broadcasts, expected)
        return masks

    def _check_tensor(
        self, hook: str, answer: object, shape: tuple[int, ...], outputs: Tensor, arguments: dict[str, Any]
    ) -> None:
        def fits(answer: object) -> bool:
            return (
                isinstance(answer, Tensor)
                and tuple(answer.shape) == shape
                and answer.dtype == outputs.dtype
                and answer.device == outputs.device
            )

        if not fits(answer):
            expected = f"{str(outputs.dtype).removeprefix('torch.')} of shape {shape} on {outputs.device}"
            raise self._blame(hook, arguments, fits, expected)

    def _blame(
        self, hook: str, arguments: dict[str, Any], is_right: Callable[[object], bool], expected: str
    ) -> PluginError:
        """The error that names the plugin whose answer was wrong, found by asking each by itself."""
        wrong = ((name, answer) for name, answer in self._answers(hook, arguments) if not is_right(answer))
        nobody = getattr(self.hooks.hook, hook).get_hookimpls()[-1].plugin_name, None  # if none has answered
        name, answer = next(wrong, nobody)
        return _contract_broken(name, hook, expected, answer)

    def _answers(self, hook: str, arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Each plugin's own answer to a hook, in the order in which they are asked."""
        for implementation in reversed(getattr(self.hooks.hook, hook).get_hookimpls()):
            answer = _ask(implementation, arguments)
            if answer is not None:
                yield implementation.plugin_name, answer


def _ask(implementation: HookImpl, arguments: dict[str, Any]) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _contract_broken(plugin_name: str, hook: str, expected: str, answer: object) -> PluginError:
    return PluginError(
        f'plugin "{plugin_name}": hook "{hook}" returned {_form(answer)}',
        f"expected {expected}",
        "see ensemblekit/core/hookspecs.py for what each hook returns",
        hook=hook,
        plugin=plugin_name,
        expected=expected,
    )


def _check_weights(weights: Tensor, shape: tuple[int, int]) -> None:
    if tuple(weights.shape) != shape:
        raise DataError(
            f"sample weights have shape {tuple(weights.shape)}",
            "the objective",
            f"give one per sample and member: {shape}",
        )


def _form(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} on {value.device}"
