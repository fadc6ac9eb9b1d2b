"""Tells whether two runs have kept outputs for the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ensemblekit.runs.outputs import KeptOutputs
    from ensemblekit.runs.run import Run


@dataclass(frozen=True)
class SplitSamples:
    """The samples of one split of a run's data."""

    path: Path
    dataset: str
    split: str
    """"test" or "validation"."""
    targets: Tensor
    index: Tensor
    inputs: tuple[str, str] | None
    """Shape and sha256 of the inputs; None if the run has recorded none."""

    @classmethod
    def of(cls, run: Run, kept: KeptOutputs, split: str = "test") -> SplitSamples:
        """Describe the samples of the outputs that a run has kept for a split."""
        inputs = _recorded_inputs(run.environment, split)
        return cls(run.path, run.spec.data.name, split, kept.targets, kept.index, inputs)

    def difference(self, other: SplitSamples) -> str:
        """Say how the samples of two runs differ; empty if they do not."""
        count, other_count = len(self.targets), len(other.targets)
        named = f" ({self.dataset} and {other.dataset})" if self.dataset != other.dataset else ""
        if count != other_count:
            return f"{count} {self.split} samples, not {other_count}{named}"
        if not _equal(self.targets, other.targets):
            return f"the targets of the {self.split} samples differ{named}"
        same_shape = self.inputs and other.inputs and self.inputs[0] == other.inputs[0]
        if same_shape and self.inputs != other.inputs:  # of another shape they may be the same images, resized
            return f"the inputs of the {self.split} samples differ{named}"
        if not torch.equal(self.index, other.index):
            return f"other samples of the data set{named}"
        return ""


def _recorded_inputs(environment: Mapping[str, Any], split: str) -> tuple[str, str] | None:
    data = environment.get("data")
    part = data.get(split) if isinstance(data, dict) else None
    if not isinstance(part, dict) or not part.get("inputs_sha256"):
        return None
    return str(part.get("shape")), str(part["inputs_sha256"])


def _equal(targets: Tensor, others: Tensor) -> bool:
    """Whether targets are equal; real ones up to the rounding of standardising them by other training data."""
    if targets.shape != others.shape or targets.is_floating_point() != others.is_floating_point():
        return False
    if not targets.is_floating_point():
        return torch.equal(targets, others)
    scale = float(targets.double().std()) if targets.numel() > 1 else 1.0
    return torch.allclose(targets.double(), others.double(), rtol=1e-5, atol=1e-5 * scale)
