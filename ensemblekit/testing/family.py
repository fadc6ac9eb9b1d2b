"""The contract of a family: that of a model, for one network that computes several members."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ensemblekit.core.errors import PluginError
from ensemblekit.core.plugin import Family
from ensemblekit.members.build import build_member
from ensemblekit.testing.checks import Check, Reference, check
from ensemblekit.testing.model import ModelContract, Shape
from ensemblekit.testing.reviews import ContractError

NUM_MEMBERS = 2
OTHER_NUMBERS = (1, 3)


class FamilyContract(ModelContract):
    """The checks of a family: networks map (B, *input_shape) to (num_members, B, num_outputs)."""

    plugin: Family
    builder = "build_family"
    builder_arguments = ("input_shape", "num_outputs", "num_members")

    def select(self, *references: Reference) -> list[Check]:
        """Leave out stacking: a family is one network already, and no engine stacks it."""
        return [check for check in super().select(*references) if check.name != "vmap works as declared"]

    def violation(self, expected: str, got: str, member: str = "", fix: str = "") -> ContractError:
        """Refer to `build_family`, where a model has `build`."""
        fix = fix.replace("build()", f"{self.builder}()")
        return super().violation(expected, got, self.builder if member == "build" else member, fix)

    def output_shape(self, batch: int, num_outputs: int, shape: Shape) -> Shape:
        """The shape of a network's outputs for a batch of inputs of a shape."""
        return (NUM_MEMBERS, batch, num_outputs + sum(self.plugin.extra_outputs(shape).values()))

    def construction(self, shape: Shape) -> partial[nn.Module]:
        """The plain call that builds a network."""
        return partial(self.plugin.build_family, shape, self.sizes[-1], NUM_MEMBERS)

    def _build_anew(self, member: int, shape: Shape, num_outputs: int) -> nn.Module:
        return build_member(self.plugin, shape, num_outputs, 0, member, NUM_MEMBERS).train()

    @check("it builds families of any size", needs=[ModelContract.known_modes, ModelContract.some_shape])
    def family_sizes(self) -> None:
        """The spec decides the number of members; one is possible too."""
        for number in OTHER_NUMBERS:
            try:
                build_member(self.plugin, self.shapes[0], self.sizes[-1], 0, 0, number)
            except PluginError as error:
                expected = f"{error.expected}, for num_members = {number}"
                fix = "derive the sizes of layers from num_members"
                raise self.violation(expected, error.what, "build", fix) from error

    @check("members start different", needs=[family_sizes])
    def different_members(self) -> None:
        """Members that start with equal outputs get equal gradients and stay equal."""
        network = build_member(self.plugin, self.shapes[0], self.sizes[-1], 0, 0, max(OTHER_NUMBERS)).eval()
        with torch.no_grad():
            outputs = network(self.inputs())
        for second in range(1, len(outputs)):
            for first in range(second):
                if torch.equal(outputs[first], outputs[second]):
                    fix = "initialise what members do not share for each of them, with torch's default generator"
                    got = f"equal outputs of members {first} and {second}"
                    raise self.violation("different initial outputs of all members", got, "build", fix)

    @check("every member learns", needs=[ModelContract.known_modes, ModelContract.some_shape])
    def learning_members(self) -> None:
        """The outputs of each member have a gradient that is not zero."""
        network = self.build()
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        for index, outputs in enumerate(network(self.inputs())):
            gradients: tuple[torch.Tensor | None, ...] = (None,)
            if outputs.requires_grad and parameters:
                loss = outputs.square().sum()
                gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            if parameters and not any(gradient is not None and bool(gradient.any()) for gradient in gradients):
                fix = "detach no member, and give each of them parameters that its outputs depend on"
                raise self.violation(f"a gradient of the outputs of member {index}", "none", "build", fix)
