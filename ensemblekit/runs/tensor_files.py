"""Tensors in safetensors files: nothing is unpickled, and a checksum covers every byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load, load_file
from torch import Tensor

from ensemblekit.core.tensors import grouped
from ensemblekit.runs.atomic import write_parts

_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of the types of elements, in the order of the tensors in a file: each is aligned to its elements."""
_ORDER = {dtype: number for number, dtype in enumerate(_DTYPES)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors of any device, memory format and dtype; returns the file's sha256.

    The file is that of `safetensors.torch.save_file`, which takes three times as long for the hundreds of small tensors
    of a checkpoint: here they are joined before they leave torch.
    """
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    sha256 = hashlib.sha256()

    def parts() -> Iterator[bytes | memoryview]:
        yield _header(tensors, names)
        for group in grouped(tensors[name].detach() for name in names):
            flat = group[0].reshape(-1) if len(group) == 1 else torch.cat([tensor.reshape(-1) for tensor in group])
            yield flat.cpu().view(torch.uint8).numpy().data

    def hashed() -> Iterator[bytes | memoryview]:
        for part in parts():
            sha256.update(part)
            yield part

    write_parts(path, hashed())
    return sha256.hexdigest()


def _header(tensors: Mapping[str, Tensor], names: Sequence[str]) -> bytes:
    """Return the beginning of a file: the length of the table of contents, and the table."""
    table, end = {}, 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU; a `SafetensorError` if it is not a safetensors file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # load_file opens only files whose names are UTF-8
        return load(path.read_bytes())
    # load_file maps the file to memory: copies stay valid if the file is replaced, truncated or removed
    return {name: tensor.clone() for name, tensor in load_file(path).items()}
