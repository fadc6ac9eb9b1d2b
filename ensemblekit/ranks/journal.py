"""What ranks have exchanged since the last checkpoint: a rank that is started again catches up with it, alone.

Exchanges are numbered. They come in the same order on all ranks, and after a checkpoint the order depends on the
checkpoint only, so that a number means the same on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

from ensemblekit.ranks.group import Tensors, packed

ROWS, FACTS, CHECKPOINT_TENSORS, TENSORS, SAVED = "rows", "facts", "checkpoint tensors", "tensors", "saved"
"""Kinds of exchanges."""
_HEADER = "entries"


@dataclass(frozen=True)
class Entry:
    """The result of an exchange: the same on all ranks, but that of checkpoint tensors, which only rank 0 has."""

    kind: str
    value: Any


class Journal:
    """The exchanges since the last checkpoint."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the next exchange."""
        self.begin = 0
        """That of the first exchange after the checkpoint."""
        self.position: tuple[int, int] | None = None
        """Epoch and step of the checkpoint; None before the first one, when nothing is kept."""
        self.entries: dict[int, Entry] = {}
        self.given: dict[int, Tensors] = {}
        """The tensors of this rank that rank 0 has collected for a checkpoint; they do not change until it is saved."""

    @property
    def end(self) -> int:
        """The number of the first exchange that is not complete."""
        return max(self.entries, default=self.number - 1) + 1

    def start(self, number: int, position: tuple[int, int]) -> None:
        """Forget what was before a checkpoint, which was saved by the exchange of this number.

        The last exchange before is kept: another rank may lack it.
        """
        self.begin, self.position = number + 1, position
        self.entries = {key: entry for key, entry in self.entries.items() if key >= number - 1}
        self.entries[number] = Entry(SAVED, list(position))
        self.given.clear()

    def add(self, kind: str, value: Any) -> None:
        """Keep the result of the next exchange."""
        self.entries[self.number] = Entry(kind, value)

    def part(self, first: int, end: int) -> dict[int, Entry]:
        """Return the exchanges from the first number to before the end."""
        return {number: self.entries[number] for number in range(first, end)}


def pack(entries: Mapping[int, Entry]) -> bytes:
    """Return entries as bytes; the tensors of checkpoints are left out."""
    header, tensors = [], {}
    for number, entry in entries.items():
        value = entry.value
        if entry.kind == ROWS:
            tensors[str(number)], value = value, None
        elif entry.kind == TENSORS:
            tensors |= {f"{number}/{name}": tensor for name, tensor in value.items()}
            value = list(value)
        elif entry.kind == CHECKPOINT_TENSORS:
            value = None
        header.append((number, entry.kind, value))
    tensors[_HEADER] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    return packed(tensors)


def unpack(data: bytes) -> dict[int, Entry]:
    """Return the entries that `pack` was given, on the CPU."""
    tensors = tensors_from_bytes(data)
    entries = {}
    for number, kind, value in json.loads(tensors[_HEADER].numpy().tobytes()):
        if kind == ROWS:
            value = tensors[str(number)]
        elif kind == TENSORS:
            value = {name: tensors[f"{number}/{name}"] for name in value}
        elif kind == CHECKPOINT_TENSORS:
            value = {}
        entries[number] = Entry(kind, value)
    return entries


def equal_rows(first: Tensor, second: Tensor) -> bool:
    """Whether rows are bit-identical, up to nan."""
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
