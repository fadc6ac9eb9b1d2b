"""Descriptions of tensors for error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def describe_tensor(tensor: Tensor, with_device: bool = False) -> str:
    """Describe a tensor: ``float32 of shape (3, 4)``, with its device ``float32 of shape (3, 4) on cpu``."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    return f"{text} on {tensor.device}" if with_device else text
