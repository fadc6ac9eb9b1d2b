"""The fingerprint of the data of a run, so that a run is never resumed or evaluated on other data without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ensemblekit.core.errors import DataError
from ensemblekit.data.hashing import sha256_of_tensors
from ensemblekit.data.sources import MapSource, Source

Fingerprint = dict[str, dict[str, Any]]
"""By split: the number of samples, shape and dtype of an input, and the sha256 of all targets and of all inputs.

The sha256 of inputs is None for samples that are different each time they are read.
"""

_LABELS = {
    "samples": "the number of samples",
    "shape": "the shape of an input",
    "dtype": "the dtype of the inputs",
    "targets_sha256": "the targets",
    "inputs_sha256": "the inputs",
    "weights_sha256": "the sample weights",
    "folds_sha256": "the folds",
}


def fingerprint(sources: Mapping[str, Source], example: Tensor) -> Fingerprint:
    """Compute the fingerprint of checked sources, by the names of their splits.

    Args:
        sources: the sources.
        example: an input; all have its shape and dtype.
    """
    return {
        name: {
            "samples": len(source),
            "shape": list(example.shape),
            "dtype": str(example.dtype).removeprefix("torch."),
            "targets_sha256": sha256_of_tensors([source.targets]),
            "inputs_sha256": _inputs_sha256(source),
        }
        for name, source in sources.items()
    }


def check_same_data(recorded: object, data: Fingerprint, name: str) -> None:
    """Raise a `DataError` that names the split and what differs from the data that a run was started with.

    Args:
        recorded: the fingerprint that the run has kept; runs of older versions have none, and nothing is compared.
        data: the fingerprint of the data now.
        name: the data set, for the error.
    """
    if not isinstance(recorded, Mapping):
        return
    for split in {**recorded, **data}:
        if change := _change(recorded.get(split), data.get(split)):
            what = f"the data is not what the run was started with: {split} split: {change}"
            raise DataError(what, f'data set "{name}"', "restore the data, or start another run")


def _inputs_sha256(source: Source) -> str | None:
    if isinstance(source, MapSource):
        return source.inputs_sha256
    return sha256_of_tensors(source.chunks()) if source.repeatable else None


def _change(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Say how the fingerprint of a split has changed; empty if it has not."""
    if before is None or now is None:
        return "it was there" if now is None else "it was not there"
    changes = [_key_change(key, before.get(key), now.get(key)) for key in _LABELS]
    return ", ".join(change for change in changes if change)


def _is_other_weighting(key: str, before: Any, now: Any) -> bool:
    """Whether only one of two fingerprints has sample weights; data without any has no such key."""
    return key == "weights_sha256" and before != now


def _key_change(key: str, before: Any, now: Any) -> str:
    if before is None or now is None or before == now:
        return f"there were {'no ' * (before is None)}sample weights" if _is_other_weighting(key, before, now) else ""
    return f"{_LABELS[key]} changed" + ("" if key.endswith("sha256") else f" from {before} to {now}")
