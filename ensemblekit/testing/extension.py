"""The contract of an extension: a run with it finishes, and every hook of it is called with what is documented."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ensemblekit.hooks import implemented_hooks
from ensemblekit.plugin import Extension
from ensemblekit.progress import Progress
from ensemblekit.runs import resume_run, train_run
from ensemblekit.testing.checks import Check, ContractError, look_at
from ensemblekit.testing.documented import hooks_are_known
from ensemblekit.testing.tiny import CopyAfter, empty_directory, registry_with, tiny_spec

OF_THE_OBJECTIVE = {"combine", "member_loss", "ensemble_loss", "sample_weights", "select_members"}


def extension_checks(extension: Extension) -> list[Check]:
    """The checks of an extension besides those of any plugin."""
    if not hooks_are_known(extension):
        return []
    claims = {
        "it only watches what is minimised": watches,
        "a run with it finishes, and can be resumed": run_finishes,
    }
    return [Check(name, extension, partial(function, extension)) for name, function in claims.items()]


def watches(extension: Extension) -> None:
    """What changes the objective is a method: it is then named in the spec as one."""
    hooks = implemented_hooks(type(extension))
    changing = sorted(OF_THE_OBJECTIVE & set(hooks))
    if changing:
        fix = "derive the class from ensemblekit.Method"
        raise ContractError("life-cycle hooks only", changing[0], look_at(type(extension), changing[0]), fix)
    if not hooks:
        fix = "implement epoch_started, epoch_finished or run_finished with @hookimpl"
        raise ContractError("at least one hook", "none", look_at(type(extension)), fix)


def run_finishes(extension: Extension) -> None:
    """Two epochs, and the second of them again from a copy of the run as it was after the first."""
    registry = registry_with(extension)
    spec = tiny_spec(registry, {"training.epochs": 2, "ensemble.members": 2, "extensions": [extension.to_table()]})
    with empty_directory() as folder:
        whole, copy = Path(folder, "whole"), Path(folder, "stopped")
        train_run(spec, whole, None, CopyAfter(1, whole, copy), registry)
        resume_run(copy, None, Progress(), registry)
