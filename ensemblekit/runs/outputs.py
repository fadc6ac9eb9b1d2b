"""The kept outputs of a run: what every member answered on validation and test data, in outputs.safetensors.

Of a run with folds also what members answered on the training samples that they have not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.core.files import sha256_of_file
from ensemblekit.runs.atomic import replacing
from ensemblekit.runs.own_files import OUTPUTS
from ensemblekit.runs.tensor_files import read_tensors, write_tensors

MAX_BYTES = 512 * 2**20
"""Outputs that are larger are not kept: they are computed again where they are needed."""


@dataclass(frozen=True)
class KeptOutputs:
    """The members' outputs on one split of the data, in the order of its samples."""

    outputs: Tensor
    """The members' raw outputs (M, N, C); (S · M, N, C) of S stochastic passes, the first pass first."""
    targets: Tensor
    """Class indices, int64 (N,), or real values (N, C)."""
    index: Tensor
    """Indices of the samples in their data set, int64 (N,): in the table or array that all splits were taken from, if
    there is one. Else validation samples that were held out from the training data are numbered as there. A test set
    that was limited keeps the numbers of all its samples."""
    networks: Tensor | None = None
    """All outputs (R, N, W) of the networks that predict, if the combination needs more than the members' outputs."""
    members: Tensor | None = None
    """Of out-of-fold outputs: the member that gave each, int64 (R, N), since of the M members only those that have not
    seen a sample answer it. Outputs are then (R, N, C), (S · R, N, C) of S passes. A sample that has one member less
    than others has -1 in the last row, and outputs of 0. None: all members answer all samples."""

    def __len__(self) -> int:
        return len(self.targets)


def is_too_large(splits: Mapping[str, KeptOutputs]) -> bool:
    """Whether outputs are larger than a run keeps."""
    return sum(_size(kept) for kept in splits.values()) > MAX_BYTES


def _size(kept: KeptOutputs) -> int:
    return kept.outputs.nbytes + (0 if kept.networks is None else kept.networks.nbytes)


def write_outputs(path: Path, splits: Mapping[str, KeptOutputs]) -> str:
    """Store the outputs of some splits, by their names, in a run directory, atomically; returns the file's sha256."""
    tensors = {
        f"{split}.{field.name}": getattr(kept, field.name)
        for split, kept in splits.items()
        for field in fields(kept)
        if getattr(kept, field.name) is not None
    }
    with replacing(path / OUTPUTS) as (staged,):
        return write_tensors(staged, tensors)


def check_outputs(path: Path, sha256: str) -> None:
    """Raise a `RunError` if the kept outputs of a run are missing or damaged, without loading them."""
    file = path / OUTPUTS
    try:
        intact = sha256_of_file(file) == sha256
    except FileNotFoundError as error:
        what = f"{OUTPUTS} is missing: it holds the members' outputs on validation and test data"
        raise RunError(what, str(file), _fix(path), path=str(file)) from error
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(file), _fix(path), path=str(file)) from error
    if not intact:
        raise RunError("damaged: checksum mismatch", str(file), _fix(path), path=str(file))


def read_outputs(path: Path, sha256: str) -> dict[str, KeptOutputs]:
    """Read and verify the kept outputs of a run, by the name of the split.

    Args:
        path: the run directory.
        sha256: that of the file, as the result of the run has it.

    Raises:
        RunError: the file is missing or damaged; `ensemblekit resume` rebuilds it.
    """
    check_outputs(path, sha256)
    file = path / OUTPUTS
    try:
        tensors = read_tensors(file)
        splits = sorted({name.partition(".")[0] for name in tensors})
        kept = {split: _kept(split, tensors) for split in splits}
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(file), _fix(path), path=str(file)) from error
    except (SafetensorError, KeyError) as error:
        what = "refused: not a safetensors file with the outputs of a run"
        raise RunError(what, str(file), _fix(path), path=str(file)) from error
    for split, part in kept.items():
        _check_shapes(split, part, file)
    return kept


def _kept(split: str, tensors: Mapping[str, Tensor]) -> KeptOutputs:
    outputs, targets, index = (tensors[f"{split}.{name}"] for name in ("outputs", "targets", "index"))
    return KeptOutputs(outputs, targets, index, *(tensors.get(f"{split}.{name}") for name in ("networks", "members")))


def _check_shapes(split: str, kept: KeptOutputs, file: Path) -> None:
    num_samples = len(kept.targets)
    whole = kept.index.dtype == torch.int64 and kept.index.shape == (num_samples,)
    if kept.members is not None:
        rows = kept.members.shape[:1] if kept.members.ndim == 2 else (0,)
        whole &= kept.members.dtype == torch.int64 and kept.members.shape == (*rows, num_samples) and rows[0] > 0
        whole &= rows[0] > 0 and len(kept.outputs) % rows[0] == 0
    outputs = [tensor for tensor in (kept.outputs, kept.networks) if tensor is not None]
    if not whole or any(tensor.ndim != 3 or tensor.shape[1] != num_samples for tensor in outputs):
        names = ("outputs", "targets", "index")
        shapes = ", ".join(f"{name} {tuple(getattr(kept, name).shape)}" for name in names)
        what = f"damaged: the tensors of the {split} data do not fit ({shapes})"
        raise RunError(what, str(file), _fix(file.parent), path=str(file))


def _fix(path: Path) -> str:
    return f"ensemblekit resume {path} rebuilds it from the checkpoints"
