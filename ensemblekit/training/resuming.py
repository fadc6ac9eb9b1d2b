"""Resuming a run elsewhere or further: what changes the last bits, and which runs can be trained further."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError, UsageError
from ensemblekit.core.threads import cores_of_machine, threads
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.manifests import Position
from ensemblekit.spec.sections import Spec
from ensemblekit.training.environment import machine_facts
from ensemblekit.training.rehearsal import Action, rehearse

BITS_WILL_DIFFER = "the last bits will differ from those of an uninterrupted run"

SELECTED = "selected_from"
"""The key of environment.json that says from which runs the members of a run were chosen: it was never trained."""


def check_was_trained(directory: RunDirectory, asked: Mapping[str, Any]) -> None:
    """Raise an error if the members of a run were chosen from other runs, and it is incomplete or to be trained.

    Args:
        directory: the run.
        asked: what was asked for, such as another number of epochs, by the name of the option; None: not asked for.

    Raises:
        UsageError: it is to be trained.
        RunError: files are missing or damaged; there are no checkpoints to rebuild them from.
    """
    path, chosen = directory.path, directory.environment.get(SELECTED)
    if not chosen:
        return
    runs = ", ".join(dict.fromkeys(str(member["run"]) for member in chosen))
    if any(value is not None for value in asked.values()):
        what = f"there is nothing to train: the members were selected from {runs}"
        raise UsageError(what, str(path), "train those runs further, and select again")
    if directory.needs_training():
        what = directory.damage[-1].rpartition("checkpoints: ")[2] if directory.damage else "it is not complete"
        fix = f"delete the directory and select again from {runs}"
        raise RunError(f"{what}; there are no checkpoints: the members were selected", str(path), fix)


def recorded_threads(environment: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let torch use as many threads as when the run was started, if this machine has as many cores."""
    number = environment.get("threads")
    return threads(number) if type(number) is int and 1 <= number <= cores_of_machine() else nullcontext()


def machine_notices(environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between this machine and the one that started the run; call it within `recorded_threads`."""
    now, labels = machine_facts(), {"torch": "torch", "cpu_capability": "CPU kernels", "threads": "threads"}
    changes = [
        f"{label} {environment[key]} → {now[key]}"
        for key, label in labels.items()
        if environment.get(key, now[key]) != now[key]
    ]
    # a run from before there was any names torch alone
    before = environment.get("compiled_code", now["compiled_code"] if "torch" not in environment else False)
    if before != now["compiled_code"]:
        changes.append(f"compiled code {'now' if now['compiled_code'] else 'no longer'} used")
    cores = environment.get("cores", now["cores"])
    if environment.get("engine") == "threaded" and cores != now["cores"]:
        changes.append(f"cores {cores} → {now['cores']}")
    if changes:
        yield f"the machine is not as it was at the start ({', '.join(changes)}): {BITS_WILL_DIFFER}"


def place_notices(environment: Mapping[str, Any], engine: str, device: str, why_engine: str) -> Iterator[str]:
    """Yield which of engine and device are not those that the run was started with."""
    for what, now, why in (("engine", engine, why_engine), ("device", device, "as asked")):
        if environment.get(what, now) != now:
            yield f'{what} "{now}" in place of "{environment[what]}" ({why}): {BITS_WILL_DIFFER}'


def check_can_go_on(before: Spec, after: Spec, position: Position) -> None:
    """Raise a `UsageError` if a run cannot be trained to another number of epochs.

    Args:
        before: its spec.
        after: the spec with the new number of epochs.
        position: how far it is trained.
    """
    total = after.training.epochs
    if total <= position.epoch:
        what = f"the run has {position.epoch} finished epochs already, and {total} in all were asked for"
        raise UsageError(what, "epochs", f"ask for more than {position.epoch}")
    started_epochs = position.epoch + (position.step > 0)
    if _growth(before, started_epochs) != _growth(after, started_epochs):
        names = ", ".join(f'"{method.name}"' for method in before.methods)
        what = f"{names} plans its members over all epochs, so this run cannot go on as one of {total} epochs"
        raise UsageError(what, "epochs", f"start another run with training.epochs = {total}")


def finished_text(path: Path, epochs: int) -> str:
    """Say that a run has finished, and what can be done with it; one of 0 epochs was selected from others."""
    if epochs == 0:
        return (
            f"there is nothing to train: the members were selected from other runs: ensemblekit evaluate {path}, "
            f"ensemblekit predict {path} FILES…"
        )
    return (
        f"the run has finished ({epochs} epochs): ensemblekit evaluate {path}, ensemblekit predict {path} FILES…, "
        f"or train it further: ensemblekit resume {path} --epochs {2 * epochs}"
    )


def _growth(spec: Spec, num_epochs: int) -> list[Action]:
    """Return what the methods do to the members in the first epochs."""
    names = ", ".join(f'"{method.name}"' for method in spec.methods)
    what = f"{names} decides by the training data what comes next, so this run cannot get another number of epochs"
    refusal = UsageError(what, "epochs", "start another run with that training.epochs")
    return rehearse(spec, num_epochs, refusal).actions
