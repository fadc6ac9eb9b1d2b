"""The files of a run directory: their names, and that none of them is a link to somewhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ensemblekit.core.errors import RunError
from ensemblekit.core.files import STAGING
from ensemblekit.runs.manifests import position_of

RUN, SPEC, ENVIRONMENT, METRICS = "run.json", "spec.toml", "environment.json", "metrics.jsonl"
WEIGHTS, MODEL, OUTPUTS, CALIBRATION, RESULT, CHECKPOINTS, LOCK = (
    "model.safetensors",
    "model.json",
    "outputs.safetensors",
    "calibration.json",
    "result.json",
    "checkpoints",
    ".lock",
)
CONFIG, CARD = "config.json", "README.md"
"""Those of a model folder, beside the weights."""

FILES = {RUN, SPEC, ENVIRONMENT, METRICS, WEIGHTS, MODEL, OUTPUTS, CALIBRATION, RESULT, LOCK}


def check_own_files(path: Path) -> None:
    """Raise a `RunError` if a file or directory of a run is a link or a special file; none of them is opened.

    The run directory itself may be a link, and files that are not the run's may be anything.
    """
    _check_entries(path, FILES, {CHECKPOINTS})
    if os.path.lexists(path / CHECKPOINTS):
        names = _names(path / CHECKPOINTS)
        _check_entries(path / CHECKPOINTS, {name for name in names if position_of(name)}, set())


def _check_entries(directory: Path, files: set[str], directories: set[str]) -> None:
    for name in _names(directory):
        entry = directory / name
        if name in files:
            is_right, expected = stat.S_ISREG, "a regular file"
        elif name in directories or name.startswith(STAGING):
            is_right, expected = stat.S_ISDIR, "a directory"
        else:
            continue
        try:
            mode = entry.lstat().st_mode
        except FileNotFoundError:
            continue  # a writer has just removed it
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(entry), "make it readable") from error
        if not is_right(mode):
            found = "a symbolic link, which is never followed" if stat.S_ISLNK(mode) else "something else"
            raise RunError(f"expected {expected}, found {found}", str(entry), "put the original back", path=str(entry))


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(directory), "make it readable") from error
