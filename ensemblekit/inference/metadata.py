"""What model.json says about the data that an ensemble was trained on, checked before a network is built for it.

Runs of format 1 have no checksum of model.json, so that anything can stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, get_args

from torch import Tensor

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.plugin import Categories, Task

MAX_INPUT_ELEMENTS = 2**31


def read_info(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DataInfo:
    """Return task and sizes of the data; a `ValueError` if no networks with these tensors can have them."""
    task, shape, num_outputs = metadata["task"], metadata["input_shape"], metadata["num_outputs"]
    if task not in get_args(Task):
        raise ValueError(f"task is {task!r:.60}")
    if not isinstance(shape, list) or not shape or not all(map(_is_size, shape)) or prod(shape) > MAX_INPUT_ELEMENTS:
        raise ValueError(f"input_shape is {shape!r:.60}")
    if not _is_size(num_outputs) or num_outputs > sum(tensor.numel() for tensor in tensors.values()):
        raise ValueError(f"num_outputs is {num_outputs!r:.60}")
    members = metadata["members"]
    if not isinstance(members, list) or not members or not all(type(member) is int for member in members):
        raise ValueError(f"members is {members!r:.60}")
    info = saved_info(metadata)
    if info.categories and not _are_blocks(info.categories, prod(shape)):
        raise ValueError(f"categories is {info.categories!r:.60}")
    return info


def saved_info(metadata: Mapping[str, Any]) -> DataInfo:
    """Return task and sizes of the data as they are written; runs of older versions know no categories."""
    blocks = tuple((first, size) for first, size in metadata.get("categories") or ())
    return DataInfo(metadata["task"], tuple(metadata["input_shape"]), metadata["num_outputs"], blocks)


def _are_blocks(blocks: Categories, num_inputs: int) -> bool:
    """Whether blocks of inputs are in order, do not overlap and are all there."""
    if not all(type(first) is int and first >= 0 and _is_size(size) for first, size in blocks):
        return False
    ends = [first + size for first, size in blocks]
    starts = [*(first for first, _ in blocks[1:]), num_inputs]
    return all(end <= start for end, start in zip(ends, starts, strict=True))


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
