"""Scaling of real targets: networks learn standardised values, and everything that users see is in original units.

It is computed in float64, so that large targets with a small spread keep their digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.errors import DataError

MAX_LOSS_OF_DIGITS = 1e-4
"""Largest error of real targets by rounding to float32, in standard deviations, if they are not standardised."""


@dataclass(frozen=True)
class TargetScaling:
    """Means and standard deviations of the targets (N, C) of the training samples.

    A deviation that is 0, or nothing but rounding, counts as 1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, targets: Tensor) -> Self:
        """Compute the scaling of targets (N, C), in float64."""
        values = targets.double()
        mean, std = values.mean(dim=0), values.std(dim=0, correction=0)
        is_constant = std <= 8 * torch.finfo(torch.float64).eps * mean.abs()
        return cls(tuple(mean.tolist()), tuple(torch.where(is_constant, 1.0, std).tolist()))

    def standardise(self, values: Tensor) -> Tensor:
        """Convert values (..., C) in original units to those that networks learn; float64."""
        mean, std = self._as_tensors(values)
        return (values.to(mean.dtype) - mean) / std

    def restore(self, values: Tensor) -> Tensor:
        """Convert what networks learn (..., C) to original units; float64."""
        mean, std = self._as_tensors(values)
        return values.to(mean.dtype) * std + mean

    def to_json(self) -> dict[str, Any]:
        """Return a description that `from_json` reads back to an equal scaling."""
        return {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Make a scaling from the result of `to_json`."""
        return cls(tuple(map(float, saved["mean"])), tuple(map(float, saved["std"])))

    def _as_tensors(self, values: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(part, dtype=_dtype(values.device), device=values.device) for part in (self.mean, self.std)
        )
        return mean, std


def scale_targets(
    targets: Mapping[str, Tensor], standardise: bool, dataset: Dataset
) -> tuple[dict[str, Tensor], TargetScaling | None]:
    """Turn the targets of all splits into those that networks learn: class indices, or float32 (N, C).

    Args:
        targets: Class indices, or real values in float64, by the name of the split.
        standardise: Whether to standardise real values by the mean and standard deviation of the split "train".
        dataset: The data set, for error messages.

    Raises:
        DataError: A value is too large, or float32 would lose digits of values that are not standardised.
    """
    if not targets["train"].is_floating_point():
        return dict(targets), None
    scaling = TargetScaling.of(targets["train"]) if standardise else None
    if scaling is None:
        _check_digits(targets, dataset)
    scaled = {
        name: (values if scaling is None else scaling.standardise(values)).float() for name, values in targets.items()
    }
    for name, values in scaled.items():
        bad = values.isfinite().all(1).logical_not().nonzero()
        if len(bad):
            what = f"target is too large: {targets[name][bad[0, 0]].tolist()}"
            fix = "remove the sample, or give targets in a larger unit"
            raise DataError(what, f'data set "{dataset.name}", {name}', fix)
    return scaled, scaling


def _check_digits(targets: Mapping[str, Tensor], dataset: Dataset) -> None:
    spread = targets["train"].std(dim=0, correction=0)
    for name, values in targets.items():
        lost = (values - values.float().double()).abs().amax(dim=0)
        output = int((lost - MAX_LOSS_OF_DIGITS * spread).argmax())
        if bool((lost > MAX_LOSS_OF_DIGITS * spread)[output]) and bool(lost.isfinite().all()):
            examples = f"{float(values[:, output].min()):.17g} to {float(values[:, output].max()):.17g}"
            what = f"float32 would round targets ({examples}) by up to {float(lost[output]):.3g}"
            has_parameter = "standardise_targets" in type(dataset).model_fields
            fix = "set standardise_targets = true" if has_parameter else "return Splits(…, standardise_targets=True)"
            raise DataError(what, f'data set "{dataset.name}", {name}', fix)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # the only device type without float64
