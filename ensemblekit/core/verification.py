"""Verifies plugin classes before they are used: hooks with the right names and arguments, compatible overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

from ensemblekit.core import hookspecs
from ensemblekit.core.errors import PluginError, choices
from ensemblekit.core.hookspecs import PROJECT

HOOK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if hasattr(function, f"{PROJECT}_spec")
}

OPTIONAL_ARGUMENTS = {"build": ("member",)}
"""Arguments that an override may name although the base class does not."""


def implemented_hooks(plugin_class: type) -> dict[str, Callable[..., Any]]:
    """Return the functions of a class that are marked with ``@hookimpl``, by name."""
    attributes: dict[str, Any] = {}
    for cls in reversed(plugin_class.__mro__):
        attributes |= vars(cls)
    return {name: attributes[name] for name in sorted(attributes) if hasattr(attributes[name], f"{PROJECT}_impl")}


def static_attribute(plugin_class: type, name: str) -> Any:
    """Return an attribute of a class as it was defined, without calling descriptors; None if it has none.

    Faster than `inspect.getattr_static`, which also looks for metaclasses that shadow the attribute.
    """
    return next((vars(cls)[name] for cls in plugin_class.__mro__ if name in vars(cls)), None)


def verify_hooks(plugin_class: type, plugin_name: str) -> None:
    """Raise a `PluginError` for a misspelt hook, an unknown argument, a default value or a missing ``@hookimpl``."""
    where = f"{plugin_class.__module__}.{plugin_class.__qualname__}"
    hooks = implemented_hooks(plugin_class)
    for hook in HOOK_ARGUMENTS:
        attribute = static_attribute(plugin_class, hook)
        if hook not in hooks and isinstance(attribute, FunctionType | staticmethod | classmethod):
            raise PluginError(
                f'plugin "{plugin_name}": {hook}() has the name of a hook but is not marked as one',
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
    """Raise a `PluginError` for a method that overrides one of the base class with an incompatible signature."""
    where = f"{plugin_class.__module__}.{plugin_class.__qualname__}"
    base = next(cls for cls in plugin_class.__mro__ if cls.__module__.startswith("ensemblekit."))
    for name in dir(base):
        declared, override = (static_attribute(cls, name) for cls in (base, plugin_class))
        if override is declared or name.startswith("_"):
            continue
        if isinstance(declared, property) and not isinstance(override, property | cached_property):
            raise PluginError(f'plugin "{plugin_name}": {name} is not a property', where, "put @property on it")
        if inspect.isfunction(declared) and inspect.isfunction(override):
            expected, own = inspect.signature(declared), inspect.signature(override)
            optional = dict.fromkeys(set(OPTIONAL_ARGUMENTS.get(name, ())) & set(own.parameters))
            try:
                own.bind(*expected.parameters, **optional)
            except TypeError as error:
                what = f'plugin "{plugin_name}": {name}() has another signature than its base class ({error})'
                arguments = ", ".join(expected.parameters)
                raise PluginError(what, where, f"write def {name}({arguments})") from error


def _verify_arguments(hook: str, function: Callable[..., Any], plugin_name: str, where: str) -> None:
    arguments = list(inspect.signature(function).parameters.values())
    if not arguments or arguments[0].name in HOOK_ARGUMENTS[hook]:
        raise PluginError(
            f'plugin "{plugin_name}": hook "{hook}" has no parameter self',
            where,
            f"write def {hook}(self, …)",
        )
    for argument in arguments[1:]:
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            raise PluginError(
                f'plugin "{plugin_name}": hook "{hook}" takes *{argument.name}, which never gets a value',
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
                "remove the default: an argument that has one never gets a value",
            )
