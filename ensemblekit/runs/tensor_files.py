"""Tensors in safetensors files: nothing is unpickled, and a checksum covers every byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from torch import Tensor

from ensemblekit.core.joining import joined

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that the format has for dtypes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors of any device and layout; returns the file's sha256.

    The format is simple: the length of a header, the header as JSON, and the elements. A checkpoint has hundreds of
    small tensors, and `safetensors.torch.save_file` takes several times as long, most of it for each tensor.
    """
    # as safetensors does: larger elements first, so that all are aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), DTYPES[tensors[name].dtype], name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in chain([len(text).to_bytes(8, "little"), text], _elements([tensors[name] for name in names])):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


def _elements(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """Yield the bytes of tensors, one after the other."""
    for flat in joined(tensors):
        yield flat.cpu().view(torch.uint8).numpy().tobytes()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU; a `SafetensorError` if it is not a safetensors file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # load_file opens only files whose names are UTF-8
        return load(path.read_bytes())
    # load_file maps the file to memory: copies stay valid if the file is replaced, truncated or removed
    return {name: tensor.clone() for name, tensor in load_file(path).items()}
