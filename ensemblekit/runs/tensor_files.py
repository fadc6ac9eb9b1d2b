"""Tensors in safetensors files: nothing is unpickled, and a checksum covers every byte."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from ensemblekit.core.files import sha256_of_file


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors of any device, layout and dtype; returns the file's sha256."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_separate(tensors), path)
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):  # safetensors hides the OSError in a text
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise
    path.chmod(mode)  # safetensors leaves a file that only its owner may read
    return sha256_of_file(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU; a `SafetensorError` if it is not a safetensors file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # load_file opens only files whose names are UTF-8
        return load(path.read_bytes())
    # load_file maps the file to memory: copies stay valid if the file is replaced, truncated or removed
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, contiguous and without shared memory, as safetensors requires."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate
