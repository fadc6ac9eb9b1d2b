"""calibration.json of a run: how its outputs are calibrated, and its prediction sets or intervals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import write_errors
from ensemblekit.runs.json_files import read_json, write_json
from ensemblekit.runs.model_files import weights_sha256
from ensemblekit.runs.own_files import CALIBRATION

FORMAT = 1
_HOLDS = "the calibration, and the prediction sets or intervals, of the trained ensemble"


def read_calibration(path: Path, format_version: int) -> dict[str, Any] | None:
    """Read and verify the file of a run directory; None if there is none.

    Args:
        path: the run directory.
        format_version: that of the run.

    Raises:
        RunError: the file is damaged, or was fitted to other weights.
    """
    file = path / CALIBRATION
    if not os.path.lexists(file):
        return None
    fix = f"remove it and fit it again: ensemblekit calibrate {path} --undo"
    values = read_json(file, _HOLDS, fix)
    if values.get("format_version") != FORMAT:
        what = f"written by a newer version (format {values.get('format_version')}; this version reads {FORMAT})"
        raise RunError(what, str(file), "upgrade ensemblekit", path=str(file))
    if values.get("weights_sha256") != weights_sha256(path, format_version):
        raise RunError("it was fitted to other weights than those of the run", str(file), fix, path=str(file))
    return values


def write_calibration(path: Path, format_version: int, values: Mapping[str, Any]) -> None:
    """Write the file of a run directory, atomically; only for the process that holds the lock."""
    seal = {"format_version": FORMAT, "weights_sha256": weights_sha256(path, format_version)}
    write_json(path / CALIBRATION, {**seal, **values})


def remove_calibration(path: Path) -> None:
    """Remove the file of a run directory, damaged or not."""
    with write_errors(path):
        (path / CALIBRATION).unlink(missing_ok=True)
