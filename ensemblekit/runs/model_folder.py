"""The model folder: a trained ensemble without its run, in the form that model hubs take.

`config.json` has everything that it takes to use the weights in `model.safetensors`. README.md, the model card, is for
people: it is never read, and may be edited.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.core.files import sha256_of_file
from ensemblekit.runs.atomic import write_bytes
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written, read_json, read_unverified
from ensemblekit.runs.model_files import read_weights
from ensemblekit.runs.own_files import CARD, CONFIG, RUN, WEIGHTS
from ensemblekit.runs.sealing import encoded, sealed

LIBRARY = "ensemblekit"
FORMAT_VERSION = 1
_HOLDS = "the spec, the classes, the preprocessing and the calibration of the trained ensemble"
_FIX = "download or export the folder again"
_NO_LINKS = "put the file itself there; a download with --local-dir makes no links"


@dataclass(frozen=True)
class ModelFolder:
    """What config.json holds, verified."""

    path: Path
    spec: str
    """The spec of the run, as TOML."""
    run_format: int
    """The format of the run directory that it comes from."""
    plugins: list[tuple[str, str, str]]
    """Kind, name and package of the plugins that the run has used."""
    metadata: dict[str, Any]
    """What model.json of the run says about the model."""
    calibration: dict[str, Any] | None
    """How outputs are calibrated, and prediction sets or intervals, as calibration.json of the run has them."""
    weights_sha256: str

    def read_weights(self) -> dict[str, Tensor]:
        """Read and verify the tensors of the model; a `RunError` if they are missing or damaged."""
        return read_weights(self.path / WEIGHTS, self.weights_sha256, _FIX)


def is_model_folder(path: Path) -> bool:
    """Whether a directory is a model folder and not a run."""
    return os.path.lexists(path / CONFIG) and not os.path.lexists(path / RUN)


def read_model_folder(path: Path) -> ModelFolder:
    """Read and verify config.json of a model folder.

    Raises:
        RunError: it is damaged, of a newer format or not ensemblekit's, or a file of the folder is a symbolic link.
    """
    for name in (CONFIG, WEIGHTS):
        _check_regular(path / name)
    file = path / CONFIG
    unverified, _ = read_unverified(file, _HOLDS, _FIX)
    if unverified.get("library_name") != LIBRARY:
        fix = "give a run directory, or a folder that `ensemblekit export --format hub` wrote"
        raise RunError(f"not a model folder of {LIBRARY}", str(file), fix, path=str(file))
    version = unverified.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        what = f"written by a newer version (format {version}; this version reads up to {FORMAT_VERSION})"
        raise RunError(what, str(file), "upgrade ensemblekit", path=str(file))
    values = read_json(file, _HOLDS, _FIX)
    with as_written(file):
        calibration = values["calibration"]
        return ModelFolder(
            path,
            str(values["spec"]),
            int(values["run_format"]),
            [(str(entry["kind"]), str(entry["name"]), str(entry["package"])) for entry in values["plugins"]],
            dict(values["model"]),
            None if calibration is None else dict(calibration),
            str(values["weights_sha256"]),
        )


def write_model_folder(
    path: Path,
    directory: RunDirectory,
    environment: Mapping[str, Any],
    spec_toml: str,
    calibration: Mapping[str, Any] | None,
    card: str,
) -> None:
    """Write the files of a model folder for a finished run to a new directory.

    Args:
        path: the directory, which must not exist.
        directory: the run.
        environment: that of the run; its version and plugins are kept.
        spec_toml: its spec.
        calibration: what its calibration.json holds, if there is one.
        card: the text of README.md.

    Raises:
        RunError: the model of the run is missing or damaged.
    """
    path.mkdir()
    source, sha256 = directory.path / WEIGHTS, directory.weights_sha256()
    try:
        shutil.copyfile(source, path / WEIGHTS)
    except FileNotFoundError as error:
        what = f"{WEIGHTS} is missing: it holds the weights of the trained ensemble"
        fix = f"ensemblekit resume {directory.path} rebuilds it from the checkpoints"
        raise RunError(what, str(source), fix, path=str(source)) from error
    if sha256_of_file(path / WEIGHTS) != sha256:
        fix = f"ensemblekit resume {directory.path} rebuilds it from the checkpoints"
        raise RunError("checksum mismatch", str(source), fix, path=str(source))
    values = {
        "library_name": LIBRARY,
        "format_version": FORMAT_VERSION,
        "ensemblekit_version": environment.get("ensemblekit"),
        "spec": spec_toml,
        "run_format": directory.format_version,
        "plugins": environment.get("plugins", []),
        "model": directory.read_metadata(),
        "calibration": calibration,
        "weights_sha256": sha256,
    }
    write_bytes(path / CONFIG, encoded(sealed(values)))
    write_bytes(path / CARD, card.encode())


def _check_regular(file: Path) -> None:
    """Raise a `RunError` if a file of the folder is a link or something else that is not a regular file."""
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return  # the error of whoever reads it says what it holds
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(file), "make it readable", path=str(file)) from error
    if not stat.S_ISREG(mode):
        found = "a symbolic link, which is never followed" if stat.S_ISLNK(mode) else "something else"
        raise RunError(f"expected a regular file, found {found}", str(file), _NO_LINKS, path=str(file))
