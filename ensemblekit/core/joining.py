"""Many small tensors as few large ones: an operation on each would cost more than its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

JOINED_BYTES = 2**24
"""Tensors are joined up to about this size; larger ones are left alone, so that no large copy is made."""


def joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Join consecutive tensors of one device and dtype, each in the order of its elements, to flat ones."""
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        differs = waiting and (waiting[0].dtype, waiting[0].device) != (flat.dtype, flat.device)
        if waiting and (differs or size + flat.nbytes > JOINED_BYTES):
            yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            waiting, size = [], 0
        waiting.append(flat)
        size += flat.nbytes
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
