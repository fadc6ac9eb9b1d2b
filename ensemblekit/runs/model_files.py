"""The trained model of a run: weights in model.safetensors, and in model.json what else it takes to use them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.core.files import sha256_of_file
from ensemblekit.runs.atomic import replacing, write_bytes
from ensemblekit.runs.json_files import read_json, read_unverified, write_json
from ensemblekit.runs.own_files import MODEL, WEIGHTS
from ensemblekit.runs.sealing import encoded, sealed
from ensemblekit.runs.tensor_files import read_tensors, write_tensors

MODEL_FORMAT = 2
_HOLDS = "the classes, the members and the preprocessing of the trained ensemble"


def write_model(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Store a model in a run directory; it exists once both files are in place."""
    with replacing(path / WEIGHTS, path / MODEL) as (weights_file, model_file):
        sha256 = write_tensors(weights_file, tensors)
        write_bytes(model_file, encoded(sealed(_record(sha256, metadata))))


def read_model(path: Path, format_version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read and verify the tensors and metadata of the model of a run.

    Args:
        path: the run directory.
        format_version: that of the run.

    Raises:
        RunError: a file is missing or damaged; `ensemblekit resume` rebuilds it.
    """
    fix = f"ensemblekit resume {path} rebuilds it from the checkpoints"
    sha256, metadata = _read_record(path / MODEL, fix, format_version)
    return read_weights(path / WEIGHTS, sha256, fix), metadata


def read_weights(file: Path, sha256: str, fix: str) -> dict[str, Tensor]:
    """Read and verify the tensors of a file; a `RunError` with this fix if they are missing or damaged."""
    try:
        intact = sha256_of_file(file) == sha256
        tensors = read_tensors(file)
    except FileNotFoundError as error:
        what = f"{file.name} is missing: it holds the weights of the trained ensemble"
        raise RunError(what, str(file), fix, path=str(file)) from error
    except SafetensorError as error:
        what = "refused: not a safetensors file" + ("" if intact else " (checksum mismatch)")
        fix = f"{fix}; other formats are never loaded"
        raise RunError(what, str(file), fix, path=str(file)) from error
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(file), fix, path=str(file)) from error
    if not intact:
        raise RunError("checksum mismatch", str(file), fix, path=str(file))
    return tensors


def read_metadata(path: Path, format_version: int) -> dict[str, Any]:
    """Read and verify the metadata of the model of a run, without its tensors; arguments as for `read_model`."""
    _, metadata = _read_record(
        path / MODEL, f"ensemblekit resume {path} rebuilds it from the checkpoints", format_version
    )
    return metadata


def weights_sha256(path: Path, format_version: int) -> str:
    """Return the checksum of the weights of a run, as model.json has it; arguments as for `read_model`."""
    return _read_record(path / MODEL, f"ensemblekit resume {path} rebuilds it from the checkpoints", format_version)[0]


def check_model(path: Path, format_version: int) -> None:
    """Raise a `RunError` if the model of a run is missing or damaged, without loading its tensors."""
    fix = f"ensemblekit resume {path} rebuilds it from the checkpoints"
    sha256, _ = _read_record(path / MODEL, fix, format_version)
    weights = path / WEIGHTS
    try:
        intact = sha256_of_file(weights) == sha256
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(weights), fix, path=str(weights)) from error
    if not intact:
        raise RunError("checksum mismatch", str(weights), fix, path=str(weights))


def add_checksum(path: Path) -> None:
    """Bring model.json of format 1 to format 2."""
    write_json(path / MODEL, _record(*_read_record(path / MODEL, "", format_version=1)))


def has_model(path: Path) -> bool:
    """Whether both files of a model are there."""
    return os.path.lexists(path / WEIGHTS) and os.path.lexists(path / MODEL)


def _record(weights_sha256: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"format_version": MODEL_FORMAT, "weights_sha256": weights_sha256, "metadata": metadata}


def _read_record(file: Path, fix: str, format_version: int) -> tuple[str, dict[str, Any]]:
    """Return the sha256 of the weights, and the metadata."""
    record, _ = read_unverified(file, _HOLDS, fix)
    if format_version == 1 and "format_version" not in record:
        sha256 = record.get("sha256")
    else:
        record = read_json(file, _HOLDS, fix)
        sha256 = record.get("weights_sha256")
    metadata = record.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(sha256, str):
        raise RunError("damaged: the metadata is missing", str(file), fix, path=str(file))
    return sha256, metadata
