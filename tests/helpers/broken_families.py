"""Families with one fault each, and the checks that must find it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ensemblekit import Family
from helpers.broken_models import ACCEPTED, GRADIENTS, INDEPENDENT, SEEDS

SIZES = "it builds families of any size"
DIFFERENT = "members start different"
LEARNING = "every member learns"


class _Net(nn.Module):
    """A linear layer for each member, which faulty networks derive from: (B, …) → (K, B, C)."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> None:
        super().__init__()
        inputs = torch.Size(input_shape).numel()
        self.weight = nn.Parameter(torch.randn(num_members, inputs, num_outputs) * inputs**-0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("bi,kio->kbo", inputs.flatten(1), self.weight)


class GoodFamily(Family):
    """A linear layer for each member."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        return _Net(input_shape, num_outputs, num_members)


class SamplesFirst(GoodFamily):
    """Gives the samples first, then the members."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs).transpose(0, 1)

        return Network(input_shape, num_outputs, num_members)


class TwoArguments(Family):
    """Does not take the number of members."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return _Net(input_shape, num_outputs, 2)


class ReturnsNothing(Family):
    """Does not return its network."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        _Net(input_shape, num_outputs, num_members)


class OnTheCPU(GoodFamily):
    """Builds a network that makes a tensor on the CPU."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs) + torch.linspace(0, 1, num_outputs)

        return Network(input_shape, num_outputs, num_members)


class AlwaysTwo(GoodFamily):
    """Has two members whatever the spec says."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        return _Net(input_shape, num_outputs, 2)


class EqualMembers(GoodFamily):
    """Starts with the same weights for all members."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        network = _Net(input_shape, num_outputs, num_members)
        with torch.no_grad():
            network.weight.copy_(network.weight[:1].clone())
        return network


class Asleep(GoodFamily):
    """Detaches the last member."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                outputs = super().forward(inputs)
                return torch.cat([outputs[:-1], outputs[-1:].detach()]) if num_members > 1 else outputs

        return Network(input_shape, num_outputs, num_members)


class Unused(GoodFamily):
    """Has a layer that forward() does not use."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        network = _Net(input_shape, num_outputs, num_members)
        network.forgotten = nn.Linear(2, 2)
        return network


class CentresTheBatch(GoodFamily):
    """Subtracts the mean of the batch, in evaluation mode too."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        class Network(_Net):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs - inputs.mean(dim=0))

        return Network(input_shape, num_outputs, num_members)


class SeedsItself(GoodFamily):
    """Seeds torch in build_family(), so that every seed gives the same family."""

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        torch.default_generator.manual_seed(0)
        return _Net(input_shape, num_outputs, num_members)


FAULTS: list[tuple[type[Family], set[str], tuple[str, ...]]] = [
    (SamplesFirst, {ACCEPTED}, ("(3, 2, 5)", "(2, 3, 5)", "SamplesFirst.build_family")),
    (TwoArguments, {ACCEPTED}, ("build_family(input_shape, num_outputs, num_members)", "these three arguments")),
    (ReturnsNothing, {ACCEPTED}, ("got: None", "end build_family() with return", "ReturnsNothing.build_family")),
    (OnTheCPU, {ACCEPTED}, ("meta device", "torch.linspace(0, 1, num_outputs)")),
    (AlwaysTwo, {SIZES}, ("num_members = 1", "AlwaysTwo.build_family")),
    (EqualMembers, {DIFFERENT}, ("equal outputs of members 0 and 1", "EqualMembers.build_family")),
    (Asleep, {LEARNING}, ("outputs of member 1", "Asleep.build_family")),
    (Unused, {GRADIENTS}, ("forgotten.weight", "Unused.build_family")),
    (CentresTheBatch, {INDEPENDENT}, ("single samples", "CentresTheBatch.build_family")),
    (SeedsItself, {SEEDS}, ("seed nothing in build_family()", "SeedsItself.build_family")),
]
