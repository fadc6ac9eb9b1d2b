"""What the rows and columns of the outputs mean: members and auxiliary networks, predictions and named slices.

Everything that the networks of an ensemble give for a batch is one tensor (R, B, W). Its first rows are the members,
the last ones the auxiliary networks. The first columns are the prediction, then come what models give beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from ensemblekit.core.errors import PluginError


def pad(outputs: Tensor, width: int | None) -> Tensor:
    """Add columns of zeros to outputs (…, C), so that they have as many as others; None adds none."""
    missing = 0 if width is None else width - outputs.shape[-1]
    return functional.pad(outputs, (0, missing)) if missing else outputs


class Outputs(NamedTuple):
    """The outputs of a batch, as hooks see them."""

    predictions: Tensor
    """Of the members (M, B, C)."""
    named: Mapping[str, Tensor]
    """Slices (M, B, size) of what the members give: parts of the prediction, and what models give beside it."""
    auxiliary: Mapping[str, Tensor]
    """Outputs (A, B, size) of auxiliary networks, by the name of their group."""


class _ByName(dict[str, Tensor]):
    """Outputs by name; a name that nothing gives is the mistake of a method, and the error says how to declare it."""

    def __init__(self, kind: str, declaration: str) -> None:
        self.kind, self.declaration = kind, declaration

    def __missing__(self, name: str) -> Tensor:
        what = f'a method uses {self.kind} called "{name}", and there are only {", ".join(self) or "none"}'
        fix = f"let {self.declaration}() of the method return the name: specs without it are then refused"
        raise PluginError(what, "the hooks of the method", fix)


@dataclass(frozen=True)
class AuxiliaryRows:
    """A group of auxiliary networks."""

    name: str
    count: int
    size: int
    """Outputs of each."""


@dataclass(frozen=True)
class OutputLayout:
    """Where everything is in the outputs (R, B, W)."""

    num_outputs: int
    """Columns of the prediction, C."""
    slices: Mapping[str, int] = field(default_factory=dict)
    """Names and sizes of parts of the prediction, as the loss declares them."""
    extras: Mapping[str, int] = field(default_factory=dict)
    """Names and sizes of what models give beside the prediction."""
    auxiliary: tuple[AuxiliaryRows, ...] = ()

    @property
    def member_width(self) -> int:
        """The number of outputs of a member."""
        return self.num_outputs + sum(self.extras.values())

    @property
    def width(self) -> int:
        """The number of columns, W; networks with fewer outputs are padded with zeros."""
        return max([self.member_width, *(rows.size for rows in self.auxiliary)])

    @property
    def num_auxiliary(self) -> int:
        """The number of auxiliary networks."""
        return sum(rows.count for rows in self.auxiliary)

    def without_auxiliary(self) -> OutputLayout:
        """Return the layout of the members alone."""
        return replace(self, auxiliary=())

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the members' predictions (M, B, C)."""
        if not self.auxiliary and outputs.shape[-1] == self.num_outputs:
            return outputs
        return outputs[: len(outputs) - self.num_auxiliary, :, : self.num_outputs]

    def split(self, outputs: Tensor) -> Outputs:
        """Split outputs (R, B, W) into what they consist of; these are views."""
        predictions = self.predictions(outputs)
        members = outputs[: len(predictions)]
        named = _ByName("outputs", "required_outputs")
        for sizes, start in ((self.slices, 0), (self.extras, self.num_outputs)):
            for name, size in sizes.items():
                named[name] = members[..., start : start + size]
                start += size
        auxiliary = _ByName("auxiliary outputs", "required_groups")
        row = len(predictions)
        for rows in self.auxiliary:
            auxiliary[rows.name] = outputs[row : row + rows.count, :, : rows.size]
            row += rows.count
        return Outputs(predictions, named, auxiliary)
