"""A plugin manager for one run: checks implementations when they are registered, and knows the defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pluggy

from ensemblekit import hookspecs
from ensemblekit.errors import PluginError, choices
from ensemblekit.hookspecs import PROJECT, hookimpl
from ensemblekit.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit.losses import Loss

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
        if hook not in hooks and inspect.isfunction(inspect.getattr_static(plugin_class, hook, None)):
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
        _verify_arguments(hook, function, plugin_name, where)


def _verify_arguments(hook: str, function: Callable[..., Any], plugin_name: str, where: str) -> None:
    for argument in list(inspect.signature(function).parameters.values())[1:]:  # without self
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
