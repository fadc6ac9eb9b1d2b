"""Members of another run, used as they are: nothing about them is trained again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from ensemblekit import Dataset, EnsemblekitError, ImageDataset, Model, Problem, load, open_run

if TYPE_CHECKING:
    from ensemblekit import DataInfo, Ensemble, Run, Spec

NOT_COMPARED = {"limit_test", "storage", "split_seed"}
"""Parameters of data sets that do not change how an input is prepared; the seeds of the splits are compared apart."""
PREPARING = {"size", "crop_size", "normalise"}
"""Parameters of image data sets that are not for augmentation."""


class Frozen(Model):
    """A trained member of another run, which does not learn any more."""

    run: Path = Field(description="directory of the other run, which must have finished")
    member: int = Field(0, ge=0, description="index of the member in that run")

    _opened: Run | None = PrivateAttr(None)

    def gives_probabilities(self) -> bool:
        other = self._readable()
        return other is not None and other.spec.loss.takes == "probabilities"

    def unsupported(self) -> dict[str, str]:
        other = self._readable()
        models = () if other is None else other.spec.member_models
        return {mode: reason for model in models for mode, reason in model.unsupported().items()}

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        try:
            other = self._other()
        except EnsemblekitError as error:
            yield Problem("run", f"{error.what} ({self.run.absolute()})", error.fix or "name a run that has finished")
            return
        if other.status != "finished":
            fix = f"finish it first: ensemblekit resume {self.run}"
            yield Problem("run", f"the run {self.run.absolute()} is {other.status}, not finished", fix)
        elif self.member >= len(other.members):
            what = f"{self.member}, but the run {self.run.absolute()} has {len(other.members)} members"
            yield Problem("member", what, f"use 0 to {len(other.members) - 1}")
        if other.spec.loss.takes != spec.loss.takes:
            yield self._other_loss(other.spec, spec)
        yield from self._data_problems(other.spec, spec)

    def _other_loss(self, other: Spec, spec: Spec) -> Problem:
        what = f'the outputs of {self.run} are {other.loss.takes} for its loss "{other.loss.name}"'
        what = f'{what}, but "{spec.loss.name}" takes {spec.loss.takes}'
        return Problem("run", what, f'set training.loss = "{other.loss.name}"')

    def _data_problems(self, other: Spec, spec: Spec) -> Iterable[Problem]:
        """Yield what makes the inputs of the two runs differ; then the member would see inputs it does not know."""
        if other.data.name != spec.data.name:
            what = f'{self.run} was trained on "{other.data.name}", but this spec uses "{spec.data.name}"'
            yield Problem("run", what, f'use a run on "{spec.data.name}"')
            return
        theirs, ours = _preparation(other), _preparation(spec)
        for key in [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]:
            what = (
                f"{self.run} was trained with data.{key} = {_text(theirs, key)}, but this spec has {_text(ours, key)}"
            )
            yield Problem(
                "run", f"{what}: samples would be split or prepared differently", f"make both equal: data.{key}"
            )
        seeds = [each.seed if each.data.split_seed is None else each.data.split_seed for each in (other, spec)]
        if seeds[0] != seeds[1]:
            what = f"{self.run} split its data by the seed {seeds[0]}, but this spec does by {seeds[1]}"
            what = f"{what}: it has learnt samples that are validation or test samples here"
            yield Problem("run", what, f"set data.split_seed = {seeds[0]}")

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        try:
            theirs = self._ensemble().info
        except EnsemblekitError as error:
            if self._readable() is not None:  # else check_spec has said so
                yield Problem("run", f"{error.what} ({self.run.absolute()})", error.fix)
            return
        if theirs != info:
            what = f'{self.run} is for {theirs.form}, but "{spec.data.name}" has {info.form}'
            yield Problem("run", what, "use a run on data of the same form")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        try:
            network = self._ensemble().members[self.member]
        except EnsemblekitError as error:
            what = f"a member is the member {self.member} of another run, which cannot be loaded: {error.what}"
            fix = f"put the run back to {self.run.absolute()}: its networks are needed whenever this member is loaded"
            raise type(error)(what, str(self.run.absolute()), fix, path=str(self.run.absolute())) from error
        return FrozenNetwork(network)

    def _other(self) -> Run:
        """Open the other run, once."""
        if self._opened is None:
            self._opened = open_run(self.run)
        return self._opened

    def _readable(self) -> Run | None:
        """The other run; None if it cannot be read, which `check_spec` and `build` report."""
        try:
            return self._other()
        except EnsemblekitError:
            return None

    def _ensemble(self) -> Ensemble:
        """Load the other ensemble anew, so that no two members share weights."""
        return load(self.run)


class FrozenNetwork(nn.Module):
    """A network that stays in evaluation mode, with weights that do not learn."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenNetwork:
        """Change the mode of this module alone: batch norm and dropout of a frozen member are those of predictions."""
        self.training = mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs


def _preparation(spec: Spec) -> dict[str, Any]:
    """Return the parameters of the data set that decide how samples are split and inputs are prepared."""
    augmentation: set[str] = set()
    if isinstance(spec.data, ImageDataset):  # it changes training samples alone
        augmentation = ImageDataset.model_fields.keys() - Dataset.model_fields.keys() - PREPARING
    ignored = NOT_COMPARED | augmentation
    return {key: value for key, value in spec.data.to_table().items() if key not in ignored}


def _text(table: dict[str, Any], key: str) -> str:
    return repr(table[key]) if key in table else "none"
