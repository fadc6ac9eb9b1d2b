"""The entry points of the kit: the checks of a plugin of any kind."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from pydantic import ValidationError

from ensemblekit.core.errors import EnsemblekitError, UsageError
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.parameters import parameters
from ensemblekit.core.plugin import Plugin
from ensemblekit.testing.checks import Check, CheckResult
from ensemblekit.testing.toy_run import required_plugins


def contract(plugin: Plugin | type[Plugin]) -> list[Check]:
    """List the checks of a plugin.

    Args:
        plugin: A plugin, or a plugin class, which stands for its default parameters.

    Returns:
        The checks, in a fixed order. Call each: it raises a `ContractError` if the plugin breaks its contract.

    Raises:
        UsageError: if the argument is not a plugin, or is a class with required parameters.
    """
    if getattr(plugin, "kind", None) not in KINDS:
        what = f"{plugin!r} is neither a plugin nor a plugin class"
        raise UsageError(what, "contract()", f"give a plugin of one of these kinds: {', '.join(KINDS)}")
    instance = plugin if isinstance(plugin, Plugin) else _with_defaults(plugin)
    checks: list[Check] = KINDS[instance.kind].load_contract()(instance).checks()
    return checks


def run_contract(plugin: Plugin | type[Plugin]) -> list[CheckResult]:
    """Run all checks of a plugin.

    Args:
        plugin: A plugin, or a plugin class, which stands for its default parameters.

    Returns:
        The result of each check. A failure is a result like any other: nothing is raised.
    """
    try:
        with redirect_stdout(sys.stderr):
            checks = contract(plugin)
    except EnsemblekitError as error:
        return [CheckResult("it can be constructed", False, str(error), 0.0)]
    return [check.result() for check in checks]


def _with_defaults(plugin_class: type[Plugin]) -> Plugin:
    """An instance with the default parameters; required ones that are plugins are the simplest of their kinds."""
    inner = required_plugins(plugin_class)
    required = [
        parameter.name for parameter in parameters(plugin_class) if parameter.required and parameter.name not in inner
    ]
    name = plugin_class.__name__
    if required:
        example = ", ".join(f"{parameter}=…" for parameter in required)
        what = f"{name} has required parameters: {', '.join(required)}"
        raise UsageError(what, "contract()", f"give an instance: contract({name}({example}))")
    try:
        return plugin_class(**inner)
    except (TypeError, ValidationError) as error:  # abstract, or defaults that its own validators reject
        what = f"{name} cannot be constructed with its default parameters: {error}"
        raise UsageError(what, "contract()", "fix the class") from error
