"""Whether two parts of a data set are really two."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from ensemblekit.data.sources import as_input, read_sample

MOST_READ = 500
"""Samples read of a part that is no tensor: reading may mean decoding files."""
MANY, SOME, FEW = 0.5, 0.1, 0.01
"""Shares of a part's samples."""
CHANCE = 2
"""So many samples in common are no fault, however small the parts are."""


def shared_samples(part: Any, other: Any) -> str:
    """In words what a second part has in common with the first; "" if it is nothing but what real data has.

    Equal samples alone prove nothing, since there are few different rows of coarse numbers. It is a fault if most
    samples of the other part are also in the first, and the first repeats its own samples much less; of data that
    hardly ever repeats itself, some are enough.
    """
    if part is other:
        return "the same object for both"
    if isinstance(part, tuple | list) and isinstance(other, tuple | list) and _same_memory(part[0], other[0]):
        return "inputs in the same memory for both"
    first, second = Counter(_digests(part)), Counter(_digests(other))
    common = sum(count for digest, count in second.items() if digest in first)
    across = common / max(second.total(), 1)
    limit = SOME if max(_repeated(first), _repeated(second)) <= FEW else MANY
    if common > CHANCE and across > limit and _repeated(first) <= across / 2:
        return f"{across:.0%} of its samples also in the other part, inputs and targets alike"
    return ""


def _repeated(digests: Counter[bytes]) -> float:
    """The share of a part's samples that are not the only one of their kind in it."""
    return sum(count for count in digests.values() if count > 1) / max(digests.total(), 1)


def _same_memory(first: Any, second: Any) -> bool:
    """Whether both start at the same element; parts of one tensor that do not overlap are fine."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return first is second
    return first.data_ptr() == second.data_ptr()


def _digests(part: Any) -> list[bytes]:
    """A digest of each sample, input and target."""
    if isinstance(part, tuple | list):
        inputs, targets = (np.ascontiguousarray(torch.as_tensor(values).numpy()) for values in part)
        return [_digest(sample, target) for sample, target in zip(inputs, targets, strict=True)]
    digests = []
    for position in range(min(len(part), MOST_READ)):
        value, target = read_sample(part, position, f"sample {position}")
        sample = as_input(value, None, f"sample {position}")
        digests.append(_digest(sample.numpy(), torch.as_tensor(target).numpy()))
    return digests


def _digest(sample: Any, target: Any) -> bytes:
    return blake2b(sample.tobytes() + target.tobytes(), digest_size=16).digest()
