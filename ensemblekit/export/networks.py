"""The networks of an ensemble as an exported graph has them: folded, with the random numbers of its passes fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.folding import with_folded_norms
from ensemblekit.members.stochastic import (
    MemberUniform,
    StochasticLayer,
    outputs_of_passes,
    split_at_first_stochastic,
    stochastic_layers,
    stochastic_pass,
)
from ensemblekit.spec.sections import NetworkPlan

Numbers = list[Tensor]
"""Random numbers in the order of the calls."""


class GraphNetwork(nn.Module):
    """A network of the ensemble, (B, *input_shape) → (1, B, C), or (S, B, C) of S stochastic passes.

    The random numbers of a prediction do not depend on the batch, so that they are constants of the graph: they were
    recorded in a pass of the original.
    """

    def __init__(self, network: nn.Module, passes: int | None, example: Tensor) -> None:
        super().__init__()
        self.network, _ = with_folded_norms(network)
        self.passes = passes
        self.recorded = [_recorded_numbers(self.network, number, example) for number in range(passes or 0)]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.passes is None:
            return outputs_of_passes(self.network, inputs, None)
        deterministic, stochastic = split_at_first_stochastic(self.network)
        features = deterministic(inputs)
        outputs = []
        for numbers in self.recorded:
            with _replayed(stochastic_layers(stochastic), numbers):
                outputs.append(stochastic(features.clone()))  # a layer may work in place
        return torch.stack(outputs)


def _recorded_numbers(network: nn.Module, number: int, example: Tensor) -> list[Numbers]:
    """Return for each stochastic layer the numbers that it samples in a pass, (1, …) each."""
    layers = stochastic_layers(network)
    recorded: list[Numbers] = [[] for _ in layers]

    def recording(layer: StochasticLayer, numbers: Numbers) -> Callable[[torch.Size], Tensor]:
        def uniform(shape: torch.Size) -> Tensor:
            sampled = StochasticLayer.uniform(layer, shape)
            numbers.append(sampled[:1].clone())  # all samples share them
            return sampled

        return uniform

    functions = [recording(*pair) for pair in zip(layers, recorded, strict=True)]
    with torch.no_grad(), stochastic_pass(network, number), _uniforms(layers, functions):
        network(example)
    return recorded


@contextmanager
def _replayed(layers: Sequence[StochasticLayer], recorded: Sequence[Numbers]) -> Iterator[None]:
    """Let layers of a network in evaluation mode use recorded numbers, without a change of their buffers."""

    def replaying(numbers: Numbers) -> Callable[[torch.Size], Tensor]:
        remaining = iter(numbers)
        return lambda shape: next(remaining).expand(shape)

    for layer in layers:
        layer.in_stochastic_pass = True
    try:
        with _uniforms(layers, [replaying(numbers) for numbers in recorded]):
            yield
    finally:
        for layer in layers:
            layer.in_stochastic_pass = False


@contextmanager
def _uniforms(layers: Sequence[StochasticLayer], functions: Sequence[Callable[[torch.Size], Tensor]]) -> Iterator[None]:
    """Replace the function of each layer that samples."""
    for layer, function in zip(layers, functions, strict=True):
        layer.__dict__["uniform"] = function
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["uniform"]


class GraphView(nn.Module):
    """What a network sees of the inputs, if a method gives each member inputs of its own."""

    def __init__(self, ensemble: Ensemble, plan: NetworkPlan, example: Tensor) -> None:
        super().__init__()
        self.hooks = ensemble.combiner.objective.members
        self.register_buffer("members", torch.tensor([plan.index]), persistent=False)
        uniform = MemberUniform(MemberUniform.keys_of(ensemble.spec.seed, [plan.index], torch.device("cpu")), 0)
        self.recorded: Numbers = []

        def recording(*shape: int, fixed: bool = False) -> Tensor:
            self.recorded.append(uniform(*shape, fixed=fixed))
            return self.recorded[-1]

        self.hooks.views(example, self.members, recording, training=False)

    members: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        remaining = iter(self.recorded)

        def replaying(*shape: int, fixed: bool = False) -> Tensor:
            return next(remaining)

        return self.hooks.views(inputs, self.members, replaying, training=False)[0]
