"""A cache of decoded images in one file: written atomically, verified when read, rebuilt if damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ensemblekit import atomic_write

UNPACKED_NOTE = ".ensemblekit.json"
"""File in the folder of an unpacked archive that says which one it is from."""


def cache_key(*parts: object) -> str:
    """Make a file name from everything that the content depends on: the sha256 of the parts."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()


def write_cache(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able metadata; readers see the complete file or none.

    A disk that is full or read-only is only a warning, since the images can be decoded again.
    """
    text = json.dumps(metadata)
    header = {"notes": text, "sha256": _digest(tensors, text)}
    try:
        with atomic_write(path) as staged:
            save_file(dict(tensors), staged, header)
    except (OSError, SafetensorError) as error:
        message = f"decoded images are not cached in {path.parent}: {error}; set ENSEMBLEKIT_DATA to a writable folder"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def read_cache(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the tensors and the metadata; None if there is no such file or if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError):
        return None
    text = header.get("notes", "")
    if _digest(tensors, text) != header.get("sha256"):
        return None
    mark_used(path)
    return tensors, json.loads(text)


def mark_used(path: Path) -> None:
    """Record the time of the last use: that of the last change, as many systems do not record the time of reading."""
    with contextlib.suppress(OSError):  # a cache that is read-only
        os.utime(path)


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """Compute the sha256 of all content, since safetensors does not notice a flipped bit."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
