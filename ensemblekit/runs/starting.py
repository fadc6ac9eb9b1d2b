"""Where a new run may start: in an empty directory, or in one that a run was begun in which has saved nothing.

A run that is killed while it starts leaves some of its first files. Nothing in them is of value: the next `train` with
the same directory takes it over, and `resume` starts the run again from its spec.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ensemblekit.core.errors import RunError
from ensemblekit.core.files import STAGING
from ensemblekit.runs.atomic import sweep, write_errors
from ensemblekit.runs.manifests import position_of
from ensemblekit.runs.own_files import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    METRICS,
    RUN,
    SPEC,
    WEIGHTS,
    check_own_files,
)
from ensemblekit.runs.record import RunRecord


def check_unused(path: Path) -> None:
    """Raise a `RunError` unless a directory is empty, missing or abandoned, and writable."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
        raise RunError("cannot write", str(path), f"choose another --out, or make {existing} writable")
    if not os.path.lexists(path):
        return
    with write_errors(path):
        if path.is_dir() and set(os.listdir(path)) <= {LOCK}:
            check_own_files(path)
            return
        if is_abandoned(path):
            return
    if os.path.lexists(path / RUN):
        fix = f"ensemblekit resume {path}, or choose another --out"
        raise RunError("a run already exists here", str(path), fix)
    what = "the directory is not empty" if path.is_dir() else "not a directory"
    raise RunError(what, str(path), "choose another --out")


def is_abandoned(path: Path) -> bool:
    """Whether a directory holds nothing but the first files of a run that has saved no checkpoint and no metrics."""
    try:
        names = {name for name in os.listdir(path) if not name.startswith(STAGING)}
        saved = {name for name in os.listdir(path / CHECKPOINTS) if not name.startswith(STAGING)}
        check_own_files(path)
        if LOCK not in names or not names <= {LOCK, RUN, SPEC, ENVIRONMENT, METRICS, CHECKPOINTS}:
            return False
        if not all(_is_part_of_a_checkpoint(name) for name in saved):
            return False
        if METRICS in names and (path / METRICS).stat().st_size:
            return False
        return RUN not in names or _spec_is_its_own(path, SPEC in names)
    except (OSError, RunError):
        return False


def no_run(path: Path) -> RunError:
    """Return the error for a directory without run.json; it says what the directory is and what can be done."""
    names = set(os.listdir(path)) if path.is_dir() and os.access(path, os.R_OK) else set()
    if names == {LOCK} or is_abandoned(path):
        what = "nothing was saved here yet: the run was stopped while it started"
        return RunError(what, str(path), f"start it again in the same directory: ensemblekit train SPEC --out {path}")
    if {SPEC, CHECKPOINTS} <= names:
        fix = f"restore {RUN}, or train again in another directory: ensemblekit train {path / SPEC} --out OTHER"
        return RunError(f"{RUN} is missing", str(path), fix)
    if {CONFIG, WEIGHTS} <= names:
        what = "a model folder, not a run: it has no outputs, metrics and checkpoints"
        return RunError(
            what, str(path), "give the run directory; a model folder is for `ensemblekit predict` and ek.load"
        )
    return RunError("not a run directory", str(path), "give the directory that `ensemblekit train` wrote")


def remove_abandoned(path: Path) -> None:
    """Remove the first files of a run; run.json first, so that what is left never looks like a run."""
    for name in (RUN, ENVIRONMENT, SPEC, METRICS):
        with suppress(OSError):
            (path / name).unlink()
    sweep(path)
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_dir():
        sweep(checkpoints)
        for name in filter(_is_part_of_a_checkpoint, os.listdir(checkpoints)):
            with suppress(OSError):
                (checkpoints / name).unlink()
        with suppress(OSError):
            checkpoints.rmdir()


def _is_part_of_a_checkpoint(name: str) -> bool:
    """Whether a file was written for a checkpoint that was not committed, if it is the only one."""
    position = position_of(name)
    return position is not None and name != position.manifest_name


def _spec_is_its_own(path: Path, has_spec: bool) -> bool:
    """Whether spec.toml is as the run has written it: nobody's edits are thrown away."""
    record = RunRecord.read(path)
    if record.status == "finished":
        return False
    return not has_spec or (path / SPEC).read_bytes() == record.spec.encode()
