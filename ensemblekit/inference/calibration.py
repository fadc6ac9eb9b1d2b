"""The calibration of an ensemble: what is done to its outputs so that the probabilities they mean are calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ensemblekit.core.losses import Loss
from ensemblekit.inference.calibrators import CALIBRATORS, Calibrator

LEAST_LOG = -745.0
"""The logarithm of the least positive float64: stands for that of a probability of 0."""


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration: temperatures of the members' outputs, or a calibrator of what they combine to."""

    kind: str
    """How it was fitted: "temperature", "vector", "isotonic" or "beta"."""
    loss: Loss
    """Defines what outputs mean."""
    calibrator: Calibrator | None = None
    """Maps the logits of the combined output; None: only the members' outputs are scaled."""
    member_temperatures: tuple[float, ...] = ()
    """Temperatures by which the members' logits are divided before they are combined: one for all, or one for each."""
    is_undetermined: bool = False
    """Whether the data does not determine a temperature of a member, which is then 1."""

    @property
    def temperature(self) -> float | None:
        """The temperature, if there is a single one."""
        if self.calibrator is None:
            return self.member_temperatures[0] if len(self.member_temperatures) == 1 else None
        return getattr(self.calibrator, "temperature", None)

    @property
    def description(self) -> str:
        """What it is in a few words: `temperature 1.37`, `temperatures 1.2, 1.4`, `isotonic`."""
        if self.temperature is not None:
            return f"temperature {self.temperature:.4g}"
        if self.member_temperatures:
            return f"temperatures {', '.join(f'{value:.4g}' for value in self.member_temperatures)}"
        return self.kind

    @property
    def problem(self) -> str:
        """Why the fit is of little use; empty if it is not."""
        if self.calibrator is not None:
            return self.calibrator.problem()
        if not self.is_undetermined:
            return ""
        return (
            "the validation samples are predicted right, so that nothing limits the confidence: a temperature stays 1"
        )

    def probabilities(self, combined: Tensor) -> Tensor:
        """Return the class probabilities (N, K) of the ensemble's output (N, C) as `Combiner.combine` gives it.

        That output is calibrated already, so that every use of it is.
        """
        return self.loss.probabilities(combined)

    def calibrated(self, combined: Tensor) -> Tensor:
        """Return outputs (N, C) that mean calibrated probabilities, from what the members' outputs combine to."""
        if self.calibrator is None:
            return combined
        return from_logits(self.calibrator(logits_of(combined, self.loss)), self.loss, combined.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the loss."""
        return {
            "kind": self.kind,
            "calibrator": None if self.calibrator is None else self.calibrator.to_json(),
            "member_temperatures": list(self.member_temperatures),
            "is_undetermined": self.is_undetermined,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], loss: Loss) -> Self:
        """Restore a calibration; a ValueError, KeyError or TypeError if the values are not those of one."""
        kind, saved = CALIBRATORS[values["kind"]], values["calibrator"]
        temperatures = tuple(float(value) for value in values["member_temperatures"])
        if any(not 0 < temperature < float("inf") for temperature in temperatures):
            raise ValueError(f"member_temperatures are {temperatures}")
        calibrator = None if saved is None else kind.from_json(saved)
        return cls(kind.name, loss, calibrator, temperatures, bool(values["is_undetermined"]))


def logits_of(outputs: Tensor, loss: Loss) -> Tensor:
    """Return numbers (..., K) whose softmax are the class probabilities that outputs (..., C) mean."""
    if type(loss).probabilities is Loss.probabilities:
        return outputs
    return loss.log_probabilities(outputs.double()).clamp_min(LEAST_LOG)


def from_logits(logits: Tensor, loss: Loss, dtype: torch.dtype) -> Tensor:
    """Return outputs (..., C) that mean the softmax of logits (..., K)."""
    if type(loss).probabilities is Loss.probabilities:
        return logits.to(dtype)
    probabilities = logits.softmax(dim=-1).clamp_min(torch.finfo(dtype).tiny)
    return loss.from_probabilities(probabilities).to(dtype)


def scaled(outputs: Tensor, temperatures: Tensor, loss: Loss) -> Tensor:
    """Divide the logits of members' outputs (..., M, N, C) by temperatures, one for all (1,) or one for each (M,)."""
    divisors = temperatures.to(outputs)[:, None, None]
    return from_logits(logits_of(outputs, loss) / divisors, loss, outputs.dtype)
