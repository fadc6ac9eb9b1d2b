"""Decoded images in one file: written in one step, verified when read, rebuilt when damaged."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def cache_key(*parts: object) -> str:
    """A file name for what the parts describe: their sha256."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()


def write_cache(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Store tensors and JSON-able notes; a reader sees the whole file or none.

    A disk that is full or read-only costs the next load its speed, not this one its result: it is a warning.
    """
    text = json.dumps(notes)
    header = {"notes": text, "sha256": _digest(tensors, text)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".writing-", dir=path.parent) as staging:
            file = Path(staging, path.name)
            save_file(dict(tensors), file, header)
            with file.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(file, path)
    except (OSError, SafetensorError) as error:
        message = f"decoded images are not kept in {path.parent}: {error}; set ENSEMBLEKIT_DATA to a folder with room"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def read_cache(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the notes, or None if there is no such file or not one bit for bit as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError):
        return None
    notes = header.get("notes", "")
    if _digest(tensors, notes) != header.get("sha256"):
        return None
    return tensors, json.loads(notes)


def _digest(tensors: Mapping[str, Tensor], notes: str) -> str:
    """The sha256 of everything in the file: a flipped bit loads from safetensors without complaint."""
    digest = hashlib.sha256(notes.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
