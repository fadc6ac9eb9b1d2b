"""Members of another run, used as they are: nothing about them is trained again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from ensemblekit import Dataset, EnsemblekitError, ImageDataset, Model, PluginError, Problem, load, open_run

if TYPE_CHECKING:
    from ensemblekit import DataInfo, Ensemble, Run, Spec

NOT_COMPARED = {"limit_test", "storage", "split_seed", "folds"}
"""Parameters of data sets that do not change how an input is prepared; the seeds of the splits are compared apart."""
PREPARING = {"size", "crop_size", "normalise"}
"""Parameters of image data sets that are not for augmentation."""


class Frozen(Model):
    """A trained member of another run, or all of its members, which do not learn any more."""

    network: ClassVar[Any] = None
    """The model of the other run, if that was passed in Python: `ensemblekit.distil` sets it in a subclass."""

    run: Path = Field(description="directory of the other run, which must have finished")
    member: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        0, description='index of the member in that run; "all", for auxiliary networks: the outputs of all members'
    )

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
        elif self.member != "all" and self.member >= len(other.members):
            what = f"{self.member}, but the run {self.run.absolute()} has {len(other.members)} members"
            yield Problem("member", what, f"use 0 to {len(other.members) - 1}")
        if self.member == "all" and any(model.key == self.key for model in spec.member_models):
            fix = 'name one of them by its index, or use role = "auxiliary"'
            yield Problem("member", "a member is one network, not all members of another run", fix)
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
        elif self.member == "all":
            yield from self._size_problems(spec, theirs)

    def _size_problems(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        """Yield why an auxiliary network cannot have the outputs of all members."""
        size = len(self._other().members) * spec.loss.num_outputs(info)
        for group in spec.auxiliary_groups:
            outputs = group.outputs or spec.ensemble.members
            if group.model.key == self.key and outputs != size:
                what = (
                    f'{outputs} outputs of the group "{group.name}", but the members of {self.run} have {size} in all'
                )
                yield Problem("/ensemble.groups", what, f"set outputs = {size}")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        try:
            ensemble = self._ensemble()
            if self.member == "all":
                return FrozenNetwork(SideBySide(ensemble.members, ensemble.loss.num_outputs(ensemble.info)))
            network = ensemble.members[self.member]
        except EnsemblekitError as error:
            members = "all members" if self.member == "all" else f"the member {self.member}"
            what = f"a network is {members} of another run, which cannot be loaded: {error.what}"
            fix = f"put the run back to {self.run.absolute()}: its networks are needed whenever this member is loaded"
            fix = error.fix if isinstance(error, PluginError) else fix
            raise type(error)(what, str(self.run.absolute()), fix, path=str(self.run.absolute())) from error
        return FrozenNetwork(network)

    def _other(self) -> Run:
        """Open the other run, once."""
        if self._opened is None:
            self._opened = open_run(self.run, model=type(self).network)
        return self._opened

    def _readable(self) -> Run | None:
        """The other run; None if it cannot be read, which `check_spec` and `build` report."""
        try:
            return self._other()
        except EnsemblekitError:
            return None

    def _ensemble(self) -> Ensemble:
        """Load the other ensemble anew, so that no two members share weights."""
        return load(self.run, model=type(self).network)


class SideBySide(nn.Module):
    """Networks whose predictions (B, C) become one output (B, M · C), that of the first member first.

    Args:
        networks: those of the members; a family computes several.
        num_outputs: columns of a prediction, C; what networks give beside it is left out.
    """

    def __init__(self, networks: nn.ModuleList, num_outputs: int) -> None:
        super().__init__()
        self.networks, self.num_outputs = networks, num_outputs

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = [network(inputs)[..., : self.num_outputs] for network in self.networks]
        # (K, B, C) of a family
        return torch.cat([each if each.ndim == 2 else each.movedim(0, 1).flatten(1) for each in outputs], dim=1)


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
