"""The entry of the kit: a plugin of any kind, and the checks that it must pass."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from pydantic import ValidationError

from ensemblekit.core.errors import EnsemblekitError, UsageError
from ensemblekit.core.losses import Loss
from ensemblekit.core.parameters import parameters
from ensemblekit.core.plugin import Dataset, Extension, Method, Model, Plugin
from ensemblekit.testing.checks import Check, CheckResult
from ensemblekit.testing.common import common_checks
from ensemblekit.testing.dataset import dataset_checks
from ensemblekit.testing.extension import extension_checks
from ensemblekit.testing.loss import loss_checks
from ensemblekit.testing.method import method_checks
from ensemblekit.testing.model import model_checks


def contract(plugin: Plugin | type[Plugin]) -> list[Check]:
    """The checks of a plugin: call each, and it raises a `ContractError` if the plugin does not keep it.

    A class stands for its default parameters; give an instance if it has required ones.
    """
    instance = plugin if isinstance(plugin, Plugin) else with_defaults(plugin)
    checks = common_checks(instance)
    if isinstance(instance, Method):
        checks += method_checks(instance)
    if isinstance(instance, Model):
        checks += model_checks(instance)
    if isinstance(instance, Dataset):
        checks += dataset_checks(instance)
    if isinstance(instance, Extension):
        checks += extension_checks(instance)
    if isinstance(instance, Loss):
        checks += loss_checks(instance)
    return checks


def run_contract(plugin: Plugin | type[Plugin]) -> list[CheckResult]:
    """What comes of each check of a plugin; a check that fails or crashes is a result like any other."""
    try:
        with redirect_stdout(sys.stderr):
            checks = contract(plugin)
    except EnsemblekitError as error:
        return [CheckResult("it can be made", False, str(error), 0.0)]
    return [check.result() for check in checks]


def with_defaults(plugin_class: type[Plugin]) -> Plugin:
    """An instance with the default parameters, or a `UsageError` that names those that have none."""
    if not (isinstance(plugin_class, type) and issubclass(plugin_class, Plugin)):
        what = f"{plugin_class!r} is neither a plugin nor a plugin class"
        raise UsageError(what, "contract()", "give an ensemblekit.Method, Model, Dataset, Extension or Loss")
    required = [parameter.name for parameter in parameters(plugin_class) if parameter.required]
    name = plugin_class.__name__
    if required:
        example = ", ".join(f"{parameter}=…" for parameter in required)
        what = f"{name} has required parameters: {', '.join(required)}"
        raise UsageError(what, "contract()", f"give an instance: contract({name}({example}))")
    try:
        return plugin_class()
    except (TypeError, ValidationError) as error:  # abstract, or defaults that its own validators refuse
        raise UsageError(f"{name} cannot be made with its defaults: {error}", "contract()", "mend the class") from error
