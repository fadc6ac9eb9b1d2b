"""Checksums of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


class TensorHash:
    """The sha256 of the values of tensors that are added one after the other."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, tensor: Tensor) -> None:
        """Add the values of a tensor; how values are spread over tensors does not matter."""
        self._sha256.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    @property
    def hexdigest(self) -> str:
        """The sha256 of all values, as 64 hexadecimal digits."""
        return self._sha256.hexdigest()


def sha256_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of the values of all tensors."""
    values = TensorHash()
    for tensor in tensors:
        values.add(tensor)
    return values.hexdigest
