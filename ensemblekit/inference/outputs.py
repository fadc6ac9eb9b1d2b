"""Checks the outputs of a trained ensemble."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ensemblekit.core.errors import NumericError

Place = Callable[[int], str]
"""Names a sample by its index."""


def check_finite(outputs: Tensor, place: Place) -> None:
    """Raise a `NumericError` unless the members' outputs (M, B, C) are finite; `place` names a sample by its index."""
    if bool(outputs.isfinite().all()):
        return
    bad = outputs.isfinite().all(dim=-1).logical_not()
    members, samples = bad.any(dim=1).nonzero().flatten().tolist(), bad.any(dim=0).nonzero().flatten().tolist()
    what = f"{_count(members, 'member')} of {len(bad)} gave outputs that are not finite"
    what += f" for {_count(samples, 'sample')} of {bad.shape[1]}"
    fix = "look for extreme input values; if outputs are not finite for all samples, the weights are not: train again"
    raise NumericError(what, f"first for {place(samples[0])}", fix)


def _count(indices: list[int], noun: str) -> str:
    return f"{len(indices)} {noun}{'s' * (len(indices) != 1)}"
