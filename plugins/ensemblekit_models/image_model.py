"""Base of the models for images: inputs are checked before a network is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemblekit import Family, Model, Problem, UsageError
from ensemblekit_models.softmax import with_softmax

if TYPE_CHECKING:
    from torch import nn

    from ensemblekit import DataInfo, Spec


class ImageInputs(Model):
    """A model for images (channels, height, width)."""

    def input_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        """Return the reason why inputs of this shape are not supported; None if they are."""
        if len(input_shape) == 3:
            return None
        what = f'"{self.name}" needs images (channels, height, width), but inputs have shape {input_shape}'
        return Problem("", what, 'use the model "mlp", or a data set of images')

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        problem = self.input_problem(info.input_shape)
        return () if problem is None else (problem,)

    def refuse_other_inputs(self, input_shape: tuple[int, ...]) -> None:
        """Raise a `UsageError` if inputs of this shape are not supported."""
        problem = self.input_problem(input_shape)
        if problem is not None:
            raise UsageError(problem.what, f"{self.name}.{problem.path}".rstrip("."), problem.fix)


class ImageModel(ImageInputs):
    """A model that builds one network for images."""

    @abstractmethod
    def network(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Build a network for inputs that `input_problem` has accepted; `build` adds the softmax, if there is one."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        self.refuse_other_inputs(input_shape)
        network = self.network(input_shape, num_outputs)
        return with_softmax(network) if self.gives_probabilities() else network


class ImageFamily(ImageInputs, Family):
    """A model that computes several members for images in one network."""

    @abstractmethod
    def family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        """Build a family for inputs that `input_problem` has accepted; `build_family` adds the softmax."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        self.refuse_other_inputs(input_shape)
        network = self.family(input_shape, num_outputs, num_members)
        return with_softmax(network) if self.gives_probabilities() else network


def too_many_poolings(blocks: int, input_shape: tuple[int, ...]) -> Problem | None:
    """Return the problem of images too small to be halved by each of the blocks; None if they are large enough."""
    _, height, width = input_shape
    fitting = min(height, width).bit_length() - 1
    if blocks <= fitting:
        return None
    what = f"{blocks}, but images of {height}×{width} can be halved only {fitting} times"
    fix = f"set blocks to {fitting} or less, or use larger images" if fitting else "use larger images"
    return Problem("blocks", what, fix)
