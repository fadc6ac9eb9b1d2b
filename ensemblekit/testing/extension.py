"""The contract of an extension: a run with it finishes, and every hook of it is called with what is documented."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.core.hooks import HOOK_ARGUMENTS, implemented_hooks
from ensemblekit.core.plugin import Extension
from ensemblekit.core.registry import Registry
from ensemblekit.display.progress import Progress
from ensemblekit.spec.sections import Spec
from ensemblekit.testing.checks import Check, ContractError, look_at
from ensemblekit.testing.common import hooks_are_known
from ensemblekit.testing.toy_run import CopyAfter, empty_directory, registry_with, tiny_spec, trained_tensors
from ensemblekit.training.runs import resume_run, train_run

CHANGING = HOOK_ARGUMENTS.keys() - {"epoch_started", "epoch_finished", "run_finished"}
"""The hooks whose answers change what is trained or predicted."""


def extension_checks(extension: Extension) -> list[Check]:
    """The checks of an extension besides those of any plugin."""
    if not hooks_are_known(extension):
        return []
    watching = Check("it only watches what is minimised", extension, partial(watches, extension))
    finishes = Check(
        "a run with it finishes, and can be resumed", extension, partial(run_finishes, extension), (watching,)
    )
    without = Check(
        "training is the same without it", extension, partial(same_without, extension), (watching, finishes)
    )
    return [watching, finishes, without]


def watches(extension: Extension) -> None:
    """What changes the objective is a method: it is then named in the spec as one."""
    hooks = implemented_hooks(type(extension))
    changing = sorted(CHANGING & set(hooks))
    if changing:
        fix = "derive the class from ensemblekit.Method"
        expected = "epoch_started, epoch_finished and run_finished only"
        raise ContractError(expected, changing[0], look_at(type(extension), changing[0]), fix)
    if not hooks:
        fix = "implement epoch_started, epoch_finished or run_finished with @hookimpl"
        raise ContractError("at least one hook", "none", look_at(type(extension)), fix)


def run_finishes(extension: Extension) -> None:
    """Two epochs, and the second of them again from a copy of the run as it was after the first."""
    registry = registry_with(extension)
    with empty_directory() as folder:
        whole, copy = Path(folder, "whole"), Path(folder, "stopped")
        train_run(_spec(registry, [extension]), whole, None, CopyAfter(1, whole, copy), registry)
        resume_run(copy, None, Progress(), registry)


def same_without(extension: Extension) -> None:
    """What freezes members, or changes them in any other way, is a method too."""
    with empty_directory() as folder:
        left, right = (_trained(own, folder / name) for name, own in (("with", [extension]), ("without", [])))
    if left.keys() != right.keys() or not all(torch.equal(left[name], right[name]) for name in left):
        hooks = implemented_hooks(type(extension))
        raise ContractError(
            "the weights of a run without it, to the bit",
            "other weights",
            look_at(type(extension), "epoch_started" if "epoch_started" in hooks else next(iter(hooks))),
            "freeze nothing, and leave the ensemble as it is; or derive the class from ensemblekit.Method",
        )


def _trained(extensions: list[Extension], folder: Path) -> dict[str, Tensor]:
    registry = registry_with(*extensions)
    train_run(_spec(registry, extensions), folder, None, Progress(), registry)
    return trained_tensors(folder)


def _spec(registry: Registry, extensions: list[Extension]) -> Spec:
    tables = [extension.to_table() for extension in extensions]
    return tiny_spec(registry, {"training.epochs": 2, "ensemble.members": 2, "extensions": tables})
