"""Finds samples that two splits of a data set have in common."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from ensemblekit.data.sources import as_input, read_sample

MAX_SAMPLES_READ = 500
"""Limit for a split that is not a tensor: reading a sample may mean decoding a file."""
MANY, SOME, FEW = 0.5, 0.1, 0.01
"""Fractions of a split's samples."""
CHANCE = 2
"""This many samples in common are not a fault, however small the splits are."""


def describe_overlap(split: Any, other: Any) -> str:
    """Describe the samples that two splits have in common.

    Equal samples alone prove nothing, since rows of coarse numbers repeat by chance. It is a fault if most samples of
    the other split are also in the first, and the first repeats its own samples much less; for data that hardly ever
    repeats itself, some are enough.

    Args:
        split: A pair of tensors (inputs, targets), or a map-style data set of (input, target).
        other: The second split, in either form.

    Returns:
        A description of the overlap; "" if there is no more of it than real data has.
    """
    if split is other:
        return "the same object for both"
    if isinstance(split, tuple | list) and isinstance(other, tuple | list) and _same_memory(split[0], other[0]):
        return "the same memory for the inputs of both"
    first, second = Counter(_digests(split)), Counter(_digests(other))
    common = sum(count for digest, count in second.items() if digest in first)
    across = common / max(second.total(), 1)
    limit = SOME if max(_repeated(first), _repeated(second)) <= FEW else MANY
    if common > CHANCE and across > limit and _repeated(first) <= across / 2:
        return f"{across:.0%} of its samples, with identical inputs and targets"
    return ""


def _repeated(digests: Counter[bytes]) -> float:
    """The fraction of samples that occur more than once."""
    return sum(count for count in digests.values() if count > 1) / max(digests.total(), 1)


def _same_memory(first: Any, second: Any) -> bool:
    """Whether both start at the same element; disjoint slices of one tensor are fine."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return first is second
    return first.data_ptr() == second.data_ptr()


def _digests(split: Any) -> list[bytes]:
    """A digest of each sample with its target."""
    if isinstance(split, tuple | list):
        inputs, targets = (np.ascontiguousarray(torch.as_tensor(values).numpy()) for values in split)
        return [_digest(sample, target) for sample, target in zip(inputs, targets, strict=True)]
    digests = []
    for index in range(min(len(split), MAX_SAMPLES_READ)):
        value, target = read_sample(split, index, f"sample {index}")
        sample = as_input(value, None, f"sample {index}")
        digests.append(_digest(sample.numpy(), torch.as_tensor(target).numpy()))
    return digests


def _digest(sample: Any, target: Any) -> bytes:
    return blake2b(sample.tobytes() + target.tobytes(), digest_size=16).digest()
