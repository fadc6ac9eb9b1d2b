"""Descriptions of tensors for error messages, and groups of small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP_BYTES = 2**22
"""Size of a group of small tensors, at most."""


def describe_tensor(tensor: Tensor, with_device: bool = False) -> str:
    """Describe a tensor: ``float32 of shape (3, 4)``, with its device ``float32 of shape (3, 4) on cpu``."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    return f"{text} on {tensor.device}" if with_device else text


def grouped(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in their order, consecutive small ones of one type and device in one list.

    For hundreds of tensors of a few numbers, joining them and one operation take less time than an operation on each.
    """
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        is_like = group and (tensor.dtype, tensor.device) == (group[0].dtype, group[0].device)
        if group and not (is_like and size + tensor.nbytes <= GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group
