"""The contract of an extension: it observes a run and never changes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.api import resume_run, run_spec
from ensemblekit.core.plugin import Extension
from ensemblekit.core.registry import Registry
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.spec.sections import Spec
from ensemblekit.testing.checks import Check, check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.hook_lists import OBSERVER_HOOKS
from ensemblekit.testing.toy_run import (
    CopyAfterEpoch,
    RaiseFailures,
    empty_directory,
    toy_registry,
    toy_spec,
    trained_weights,
)


class ExtensionContract(PluginContract[Extension]):
    """The checks of an extension."""

    kind = "extension"

    def checks(self) -> list[Check]:
        """All checks; if the hooks cannot be registered, only those that call none of them."""
        return super().checks() if self.hooks_are_known else self.select(PluginContract)

    @check("it only observes the run")
    def observes(self) -> None:
        """A plugin that changes what is minimised is a method, so that the spec names it as one."""
        allowed = ", ".join(OBSERVER_HOOKS)
        hooks = implemented_hooks(self.plugin_class)
        changing = [hook for hook in hooks if hook not in OBSERVER_HOOKS]
        if changing:
            fix = "derive the class from ensemblekit.Method"
            raise self.violation(f"no hooks other than {allowed}", changing[0], changing[0], fix)
        if not hooks:
            raise self.violation("at least one hook", "none", fix=f"implement one of {allowed} with @hookimpl")

    @check("a run with it finishes and resumes", needs=[observes])
    def run_finishes(self) -> None:
        """Two epochs, and the second again from a copy of the run directory as it was after the first."""
        registry = toy_registry(self.plugin)
        with empty_directory() as folder:
            whole, copy = folder / "whole", folder / "stopped"
            run_spec(self._spec(registry), registry, whole, [CopyAfterEpoch(1, copy), RaiseFailures()])
            resume_run(copy, registry, [RaiseFailures()])

    @check("training is bit-identical without it", needs=[observes, run_finishes])
    def same_without(self) -> None:
        """A plugin that freezes members, or changes them in another way, is a method."""
        registry = toy_registry(self.plugin)
        spec = self._spec(registry)
        with empty_directory() as folder:
            left = _weights_after(spec, folder / "with", registry)
            right = _weights_after(replace(spec, extensions=()), folder / "without", registry)
        if left.keys() != right.keys() or not all(torch.equal(left[name], right[name]) for name in left):
            hooks = implemented_hooks(self.plugin_class)
            raise self.violation(
                "weights that are bit-identical to those of a run without it",
                "different weights",
                "epoch_started" if "epoch_started" in hooks else next(iter(hooks)),
                "do not freeze or change members; or derive the class from ensemblekit.Method",
            )

    def _spec(self, registry: Registry) -> Spec:
        return replace(toy_spec(registry, {"training.epochs": 2}), extensions=(self.plugin,))


def _weights_after(spec: Spec, folder: Path, registry: Registry) -> dict[str, Tensor]:
    run_spec(spec, registry, folder)
    return trained_weights(folder)
