"""The hooks of one run: implementations are verified when they are registered, results when they are returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import pluggy
import torch
from torch import Tensor

from ensemblekit.core import hookspecs
from ensemblekit.core.containment import Containment
from ensemblekit.core.errors import NumericError, PluginError
from ensemblekit.core.hookspecs import PROJECT, hookimpl
from ensemblekit.core.losses import Loss
from ensemblekit.core.plugin import Method, Plugin
from ensemblekit.core.seeds import generator
from ensemblekit.core.tensors import describe_tensor
from ensemblekit.core.verification import static_attribute, verify_hooks

DEFAULTS = "defaults"


class Defaults:
    """What happens where no method implements a hook: the outputs are averaged, and each member's loss is l/M."""

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return outputs.mean(dim=0)  # raw outputs are averaged, not probabilities

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        return loss(outputs, target) / num_members

    @hookimpl
    def members_at_start(self, num_members: int) -> int:
        return num_members


class PredictionDefaults(Defaults):
    """The defaults where predictions are combined: the loss knows what its outputs mean."""

    @hookimpl
    def combine(self, outputs: Tensor, loss: Loss) -> Tensor:  # type: ignore[override]  # hooks name what they need
        return loss.mixture(outputs)


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        # Only look at marked functions of the class: touching every attribute of a pydantic instance
        # runs its properties and sets off pydantic's deprecation warnings.
        function = static_attribute(type(plugin), name)
        if not inspect.isfunction(function) or not hasattr(function, f"{PROJECT}_impl"):
            return None
        return super().parse_hookimpl_opts(plugin, name)


class RunHooks:
    """The hooks of a run's methods, extensions and listeners, with the defaults below them.

    Args:
        plugins: methods and extensions; of several results that of the plugin listed last counts.
        listeners: other objects whose ``@hookimpl`` methods follow the life cycle, such as a display. One that fails
            is left out from then on, like an extension, unless it has the attribute `is_essential`.
        defaults: what happens where none of them implements a hook.
    """

    def __init__(
        self, plugins: Iterable[Plugin], listeners: Iterable[object] = (), defaults: type[Defaults] = Defaults
    ) -> None:
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(defaults(), name=DEFAULTS)
        for plugin in plugins:
            verify_hooks(type(plugin), plugin.name)
            if self._manager.has_plugin(plugin.name):
                raise PluginError(f'plugin "{plugin.name}" is listed twice', fix="list each method once")
            self._manager.register(plugin, name=plugin.name)
            if not isinstance(plugin, Method):
                self._contain(plugin, f'{plugin.kind} "{plugin.name}"')
        for listener in listeners:
            verify_hooks(type(listener), type(listener).__name__)
            self._manager.register(listener)
            if not getattr(listener, "is_essential", False):
                self._contain(listener, "the display")

    def _contain(self, observer: object, name: str) -> None:
        """Let a failure of an observer be a notice, and not the end of the run."""
        containment = Containment(name, lambda text: self.call.notice(text=text))
        for caller in self._manager.get_hookcallers(observer) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is observer:
                    contained = containment.contain(caller.name, implementation.function)
                    implementation.function = contained  # type: ignore[misc]  # pluggy has no other way to wrap one

    @property
    def call(self) -> Any:
        """Calls a hook by its name: ``hooks.call.combine(outputs=…)``."""
        return self._manager.hook

    def call_observers(self, hook: str, **arguments: Any) -> None:
        """Call a hook of all plugins and listeners but the methods."""
        for implementation in reversed(getattr(self.call, hook).get_hookimpls()):
            if not isinstance(implementation.plugin, Method):
                implementation.function(*(arguments[name] for name in implementation.argnames))

    def announce(self, hook: str, **arguments: Any) -> None:
        """Call a hook of the life cycle with copies for each plugin, so that its changes reach nobody else."""
        for implementation in reversed(getattr(self.call, hook).get_hookimpls()):
            values = (arguments[name] for name in implementation.argnames)
            implementation.function(*(deepcopy(value) if isinstance(value, dict | list) else value for value in values))

    def is_implemented(self, hook: str) -> bool:
        """Whether a plugin, or the defaults, implement a hook."""
        return bool(getattr(self.call, hook).get_hookimpls())

    def results(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Call each plugin's implementation of a hook by itself; yields (plugin name, result) unless that is None.

        A plugin gets only what it has `fitted` itself.
        """
        fitted = arguments.get("fitted")
        for implementation in reversed(getattr(self.call, hook).get_hookimpls()):
            if fitted is not None:
                arguments["fitted"] = fitted if implementation.plugin_name == self.fitting_plugin else None
            result = implementation.function(*(arguments[name] for name in implementation.argnames))
            if result is not None:
                yield implementation.plugin_name, result

    def first_result(self, hook: str, **arguments: Any) -> tuple[str, Any]:
        """Return the name of the plugin whose result counts and that result; ("", None) if there is none."""
        return next(self.results(hook, **arguments), ("", None))

    def passes(self, num_members: int) -> int | None:
        """Return the number of stochastic passes per network in a prediction; None: one deterministic pass."""
        name, passes = self.first_result("passes", num_members=num_members)
        if passes is not None and (not isinstance(passes, int) or isinstance(passes, bool) or passes < 1):
            raise violation(name, "passes", "an integer of at least 1", passes)
        return passes

    def sample_weights(
        self, num_samples: int, num_members: int, seed: int, targets: Tensor | None = None
    ) -> Tensor | None:
        """Sample the weights (N, M) of a run from its seed; None if all samples have weight 1."""
        product = None
        shape = (num_samples, num_members)
        for implementation in self.call.sample_weights.get_hookimpls():
            # a generator for each method, so that its weights do not depend on the methods it is composed with
            name = implementation.plugin_name
            source = generator(seed, "sample_weights", name)
            arguments = {
                "num_samples": num_samples,
                "num_members": num_members,
                "generator": source,
                "targets": targets,
            }
            weights = implementation.function(*(arguments[argument] for argument in implementation.argnames))
            if weights is None:
                continue
            if not _is_float_tensor(weights) or tuple(weights.shape) != shape:
                raise violation(name, "sample_weights", f"a floating-point tensor of shape {shape}", weights)
            if not bool(weights.isfinite().all()):
                raise not_finite(name, "sample_weights")
            product = weights if product is None else product * weights
        return product

    @property
    def fits_combiner(self) -> bool:
        """Whether the combination of outputs is fitted on validation data."""
        return self.is_implemented("fit_combiner")

    @cached_property
    def fitting_plugin(self) -> str | None:
        """The name of the plugin that fits the combination: the one listed last."""
        implementations = self.call.fit_combiner.get_hookimpls()
        return implementations[-1].plugin_name if implementations else None

    def fit_combiner(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """Fit `combine` on validation data, whose outputs are among the arguments; None if there is nothing to fit."""
        outputs: Tensor = arguments["outputs"]
        name = self.fitting_plugin or ""
        fitted = dict(self.results("fit_combiner", **arguments)).get(name)
        if fitted is None:
            return None
        if not _is_float_tensor(fitted) or fitted.device != outputs.device:
            raise violation(name, "fit_combiner", f"a floating-point tensor on {outputs.device}", fitted)
        if not bool(fitted.isfinite().all()):
            raise not_finite(name, "fit_combiner")
        result: Tensor = fitted
        return result

    def names(self, argument: str, hooks: Iterable[str]) -> bool:
        """Whether an implementation of one of these hooks names an argument."""
        implementations = (one for hook in hooks for one in getattr(self.call, hook).get_hookimpls())
        return any(argument in implementation.argnames for implementation in implementations)

    def check_result(self, hook: str, result: object, shape: Sequence[int], like: Tensor, **arguments: Any) -> None:
        """Raise a `PluginError` that names the plugin unless a hook's result has this shape and the dtype of another.

        Args:
            hook: the name of the hook.
            result: what counts of its results.
            shape: the shape that it should have.
            like: a tensor of the dtype and device that it should have.
            arguments: those that the hook was called with.
        """

        def fits(result: object) -> bool:
            return (
                isinstance(result, Tensor)
                and result.shape == torch.Size(shape)
                and result.dtype == like.dtype
                and result.device == like.device
            )

        if not fits(result):
            expected = f"{str(like.dtype).removeprefix('torch.')} of shape {tuple(shape)} on {like.device}"
            raise self.violation(hook, fits, expected, **arguments)

    def violation(self, hook: str, is_right: Callable[[object], bool], expected: str, **arguments: Any) -> PluginError:
        """Find the plugin that returned a wrong value by calling each by itself; returns the error that names it."""
        wrong = ((name, result) for name, result in self.results(hook, **arguments) if not is_right(result))
        no_result = getattr(self.call, hook).get_hookimpls()[-1].plugin_name, None
        name, result = next(wrong, no_result)
        return violation(name, hook, expected, result)

    def learning_rate(self, base: float, epoch: float, num_epochs: int) -> float | None:
        """Return the learning rate that a method sets; None if none does."""
        rate: float | None = self.call.learning_rate(base=base, epoch=epoch, num_epochs=num_epochs)
        if rate is not None and (not isinstance(rate, int | float) or not 0 <= rate < float("inf")):
            name, _ = self.first_result("learning_rate", base=base, epoch=epoch, num_epochs=num_epochs)
            raise violation(name, "learning_rate", "a number of at least 0, or None", rate)
        return rate


def violation(plugin_name: str, hook: str, expected: str, result: object) -> PluginError:
    """Return the error for a hook that returned something else than its specification says."""
    return PluginError(
        f'plugin "{plugin_name}": hook "{hook}" returned {describe_value(result)}',
        "",
        "see ensemblekit/core/hookspecs.py for what each hook returns",
        plugin=plugin_name,
        hook=hook,
        expected=expected,
    )


def not_finite(plugin_name: str, hook: str, where: str = "", fix: str = "") -> NumericError:
    """Return the error for a hook that returned nan or infinity."""
    what = f'plugin "{plugin_name}": hook "{hook}" returned a value that is not finite'
    return NumericError(what, where, fix, plugin=plugin_name, hook=hook)


def describe_value(value: object) -> str:
    """Describe a value in a few words: dtype, shape and device of a tensor, the value of a number, else its type."""
    if isinstance(value, int | float) or value is None:
        return f"{value} (a float)" if isinstance(value, float) else str(value)
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return describe_tensor(value, with_device=True)


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
