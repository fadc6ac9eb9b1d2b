"""A plugin manager for one run: checks implementations when they are registered, and knows the defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pluggy

from ensemblekit.core import hookspecs
from ensemblekit.core.errors import PluginError, choices
from ensemblekit.core.hookspecs import PROJECT, hookimpl
from ensemblekit.core.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit.core.losses import Loss

DEFAULTS = "defaults"

HOOK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if hasattr(function, f"{PROJECT}_spec")
}


class Defaults:
    """What happens where no method answers: mean of the outputs, l/M for each member, nothing else."""

    @hookimpl
    def combine(self, outputs: Tensor) -> Tensor:
        return outputs.mean(dim=0)  # raw outputs are averaged, not probabilities

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        return loss(outputs, target) / num_members

    @hookimpl
    def members_at_start(self, num_members: int) -> int:
        return num_members


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        # Only look at functions of the class: touching every attribute of a pydantic instance
        # runs its properties and sets off pydantic's deprecation warnings.
        if not inspect.isfunction(inspect.getattr_static(type(plugin), name, None)):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def implemented_hooks(plugin_class: type) -> dict[str, Callable[..., Any]]:
    """The functions of a class that are marked with ``@hookimpl``, by name."""
    functions = {name: inspect.getattr_static(plugin_class, name) for name in dir(plugin_class)}
    return {name: function for name, function in functions.items() if hasattr(function, f"{PROJECT}_impl")}


def verify_hooks(plugin_class: type, plugin_name: str) -> None:
    """Raise a `PluginError` for a misspelt hook, an unknown argument, a default value or a forgotten ``@hookimpl``."""
    where = f"in {plugin_class.__module__}.{plugin_class.__qualname__}"
    hooks = implemented_hooks(plugin_class)
    for hook in HOOK_ARGUMENTS:
        own = inspect.getattr_static(plugin_class, hook, None)
        if hook not in hooks and isinstance(own, FunctionType | staticmethod | classmethod):
            raise PluginError(
                f'plugin "{plugin_name}": {hook}() is named like a hook but is not marked as one',
                where,
                "put @hookimpl on it, or rename it",
            )
    for hook, function in hooks.items():
        if hook not in HOOK_ARGUMENTS:
            raise PluginError(
                f'plugin "{plugin_name}": there is no hook "{hook}"', where, choices(hook, HOOK_ARGUMENTS)
            )
        if not inspect.isfunction(function):
            raise PluginError(
                f'plugin "{plugin_name}": hook "{hook}" is a {type(function).__name__}, which is never called',
                where,
                f"make it a method: def {hook}(self, …)",
            )
        _verify_arguments(hook, function, plugin_name, where)


def verify_overrides(plugin_class: type, plugin_name: str) -> None:
    """Raise a `PluginError` for a method of the base class that is defined anew and cannot be called like it."""
    where = f"in {plugin_class.__module__}.{plugin_class.__qualname__}"
    base = next(cls for cls in plugin_class.__mro__ if cls.__module__.startswith("ensemblekit."))
    for name in dir(base):
        declared, own = (inspect.getattr_static(cls, name, None) for cls in (base, plugin_class))
        if own is declared or name.startswith("_"):
            continue
        if isinstance(declared, property) and not isinstance(own, property | cached_property):
            raise PluginError(f'plugin "{plugin_name}": {name} is not a property', where, "put @property on it")
        if inspect.isfunction(declared) and inspect.isfunction(own):
            expected = inspect.signature(declared)
            try:
                inspect.signature(own).bind(*expected.parameters)
            except TypeError as error:
                what = f'plugin "{plugin_name}": {name}() is called with other arguments ({error})'
                arguments = ", ".join(expected.parameters)
                raise PluginError(what, where, f"write def {name}({arguments})") from error


def _verify_arguments(hook: str, function: Callable[..., Any], plugin_name: str, where: str) -> None:
    arguments = list(inspect.signature(function).parameters.values())
    if not arguments or arguments[0].name in HOOK_ARGUMENTS[hook]:
        raise PluginError(
            f'plugin "{plugin_name}": hook "{hook}" does not take the plugin itself',
            where,
            f"write def {hook}(self, …)",
        )
    for argument in arguments[1:]:
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            raise PluginError(
                f'plugin "{plugin_name}": hook "{hook}" takes *{argument.name}, which is never filled',
                where,
                f"name the arguments you need; {choices('', HOOK_ARGUMENTS[hook])}",
            )
        if argument.name not in HOOK_ARGUMENTS[hook]:
            raise PluginError(
                f'plugin "{plugin_name}": hook "{hook}" has no argument "{argument.name}"',
                where,
                choices(argument.name, HOOK_ARGUMENTS[hook]),
            )
        if argument.default is not argument.empty:
            raise PluginError(
                f'plugin "{plugin_name}": argument "{argument.name}" of hook "{hook}" has a default value',
                where,
                "remove the default: an argument with one is never filled",
            )


def hook_manager(plugins: Iterable[Plugin]) -> pluggy.PluginManager:
    """A manager with the defaults and then the given plugins, so that the last listed answers first."""
    manager = _Manager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(Defaults(), name=DEFAULTS)
    for plugin in plugins:
        verify_hooks(type(plugin), plugin.name)
        if manager.has_plugin(plugin.name):
            raise PluginError(f'plugin "{plugin.name}" is listed twice', fix="list each method once")
        manager.register(plugin, name=plugin.name)
    return manager
