"""Members that are known by their predictions alone, such as those of a program of your own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from ensemblekit import DataError, EnsemblekitError, Model, Problem, UsageError
from ensemblekit_models.prediction_files import read_predictions

if TYPE_CHECKING:
    from ensemblekit import DataInfo, Loss, Spec

SUM_TOLERANCE = 0.01
"""How far a sum of probabilities may be from 1."""


class Predictions(Model):
    """A member that is a file of outputs, or of class probabilities, by the samples' indices."""

    path: Path = Field(
        description="a .safetensors or .npz file with arrays train, test and perhaps validation, or a .csv file"
    )
    content: Literal["outputs", "probabilities"] = Field(
        "outputs", description="what the file has: outputs as networks learn them, or class probabilities"
    )
    smoothing: float = Field(
        1e-3,
        ge=0,
        lt=1,
        description="share of the uniform distribution in the class probabilities, because log 0 is infinite",
    )
    softmax: bool = Field(False, description='outputs are probabilities, as the loss "nll" takes them')

    _arrays: dict[str, Tensor] | None = PrivateAttr(None)

    def gives_probabilities(self) -> bool:
        return self.softmax

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        try:
            arrays = self._read()
        except EnsemblekitError as error:
            yield Problem("path", f"{error.what} ({error.where})", error.fix)
            return
        if self.content == "probabilities":
            for name, array in arrays.items():
                known = array[~array.isnan().any(dim=1)]
                if bool((known < 0).any()) or bool(((known.sum(dim=1) - 1).abs() > SUM_TOLERANCE).any()):
                    what = f'array "{name}" of {self.path.absolute()} has rows that are not probabilities'
                    yield Problem("content", what, 'give numbers of at least 0 that sum to 1, or set "outputs"')

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if self.content == "probabilities" and info.task != "classification":
            what = f'the task of "{spec.data.name}" is {info.task}, which has no class probabilities'
            yield Problem("content", what, 'set it to "outputs"')
            return
        try:
            got = self._read()["train"].shape[1]
        except EnsemblekitError:  # check_spec has said so
            return
        expected = info.num_outputs if self.content == "probabilities" else spec.loss.num_outputs(info)
        if got != expected:
            what = f"expected {expected} {self.content} for each sample, got {got} ({self.path.absolute()})"
            yield Problem("path", what, f'use predictions of "{spec.data.name}" for the loss "{spec.loss.name}"')

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return NoNetwork(num_outputs, str(self.path.absolute()))

    def known_outputs(self, split: str, indices: Tensor, loss: Loss) -> Tensor:
        arrays = self._read()
        # held-out validation samples keep their indices in the training data
        name = split if split in arrays else "train"
        array, where = arrays[name], f'{self.path.absolute()}, array "{name}"'
        indices = indices.cpu()
        is_missing = indices >= len(array)
        rows = array[indices.clamp(max=len(array) - 1)]
        is_missing |= rows.isnan().any(dim=1)
        if bool(is_missing.any()):
            what = f"expected predictions of {len(indices):,} {split} samples, got none of {int(is_missing.sum()):,}"
            what = f"{what}, the first with index {int(indices[is_missing][0])}"
            raise DataError(what, where, f"add rows: the array has {len(array):,}", path=str(self.path.absolute()))
        if self.content == "outputs":
            return rows
        return loss.from_probabilities((1 - self.smoothing) * rows + self.smoothing / rows.shape[1])

    def _read(self) -> dict[str, Tensor]:
        """Read the file, once."""
        if self._arrays is None:
            self._arrays = read_predictions(self.path.absolute())
        return self._arrays


class NoNetwork(nn.Module):
    """Stands for a member without a network: it has a shape, but computes nothing."""

    def __init__(self, num_outputs: int, path: str) -> None:
        super().__init__()
        self.num_outputs, self.path = num_outputs, path

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.device.type == "meta":  # where only shapes are computed
            return torch.empty(len(inputs), self.num_outputs, device="meta")
        what = f"this member has no network: it knows only its predictions for the samples of {self.path}"
        fix = "use samples of the run's own data, or an ensemble without this member"
        raise UsageError(what, 'model "predictions"', fix)
