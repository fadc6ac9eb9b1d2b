"""One member after the other: the reference engine, simple and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ensemblekit.core.objective import Objective
from ensemblekit.core.outputs import pad
from ensemblekit.core.plugin import Family
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine
from ensemblekit.engines.part import Part, Samples, at_least_float32, backpropagate, sum_gradients
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.flat_parameters import FlatParameters
from ensemblekit.members.state import MemberState
from ensemblekit.members.stochastic import outputs_of_passes, set_training_step, stochastic_layers


class MemberPart(Part):
    """A single network with its own optimizer: a member, a family of members or an auxiliary network."""

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        super().__init__(members, objective, settings)
        (self.member,) = members
        self.network = self.member.network
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.network) if settings.compile else self.network
        self.stochastic_layers = stochastic_layers(self.network)
        self.outputs: Tensor | None = None
        self.inputs: Tensor | None = None
        self.second_inputs: Tensor | None = None
        self.step = 0
        self.in_second_pass = False
        if not self.frozen:
            self.learned = {name: value for name, value in self.network.named_parameters() if value.requires_grad}
            self.parameters = FlatParameters(self.learned, self.optimizer)
            self.parameters.load_state(self.member.optimizer_state)
            for name, value in self.learned.items():
                value.data = self.parameters.tensors[name]

    @property
    def learned_rows(self) -> list[Tensor]:
        return [value.data.unsqueeze(0) for value in self.learned.values()]

    @property
    def buffers(self) -> list[Tensor]:
        return list(self.network.buffers())

    def gradient_rows(self) -> Sequence[Tensor]:
        return [gradient.unsqueeze(0) for gradient in self.gradients]

    def forward(self, batch: Batch, step: int) -> Tensor:
        if self.frozen:
            self.second_inputs = batch.inputs
            return self.predict(batch.inputs, samples=Samples("train", batch.index))[0]
        inputs = self.views(batch.inputs, step)
        inputs = inputs if self.keys is None else inputs[0]
        if self.objective.members.have_second_inputs:
            inputs = inputs.detach().requires_grad_()  # the second inputs are derived from their gradient
        return self._forward(inputs, step, in_second_pass=False)

    def forward_second(self) -> Tensor:
        assert self.second_inputs is not None
        if self.frozen:
            return self.predict(self.second_inputs)[0]
        return self._forward(self.second_inputs, self.step, in_second_pass=True)

    def _forward(self, inputs: Tensor, step: int, in_second_pass: bool) -> Tensor:
        if not self.network.training:
            self.network.train()
        self.step, self.in_second_pass = step, in_second_pass
        set_training_step(self.stochastic_layers, step, in_second_pass)
        keep_graph = not self.settings.recompute
        with torch.set_grad_enabled(keep_graph), self.settings.autocast():
            outputs = self._rows(self.call(inputs))
        self.outputs = outputs if keep_graph else None
        self.inputs = inputs if inputs.requires_grad or not keep_graph else None
        return at_least_float32(outputs.detach())

    def _rows(self, outputs: Tensor) -> Tensor:
        """Return the outputs of a network as (K, B, W); a family has several rows already."""
        return pad(outputs if isinstance(self.member.model, Family) else outputs.unsqueeze(0), self.settings.width)

    def backward(self, gradient: Tensor) -> None:
        if self.frozen:
            return
        outputs = self.outputs
        buffers: list[tuple[Tensor, Tensor]] = []
        if outputs is None:
            assert self.inputs is not None
            buffers = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
            set_training_step(self.stochastic_layers, self.step, self.in_second_pass)
            with self.settings.autocast():
                outputs = self._rows(self.call(self.inputs))
        gradients, input_gradient = backpropagate(gradient, outputs, list(self.learned.values()), self.inputs)
        if self.inputs is not None and input_gradient is not None:
            self.second_inputs = self.objective.members.second_inputs(self.inputs.detach(), input_gradient)
        self.gradients = sum_gradients(self.gradients, gradients)
        for buffer, value in buffers:
            buffer.copy_(value)  # batch-norm statistics count a batch once, although it was computed twice
        self.outputs = self.inputs = None

    def take_step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        self.parameters.step([gradient[0] for gradient in gradients], learning_rate)

    def compute(self, inputs: Tensor, passes: int | None) -> Tensor:
        self.network.eval()
        inputs = inputs if self.keys is None else inputs[0]
        with torch.no_grad(), self.settings.autocast():
            outputs = (
                self.call(inputs).unsqueeze(0) if passes is None else outputs_of_passes(self.network, inputs, passes)
            )
        return outputs if isinstance(self.member.model, Family) else outputs.unsqueeze(1)

    def store_optimizer_state(self) -> None:
        if not self.frozen:
            self.member.optimizer_state = self.parameters.state()


class SequentialEngine(Engine):
    """Computes one member after the other; each uses all threads of the machine."""

    name = "sequential"

    @classmethod
    def unsupported(cls, members: Sequence[MemberState], settings: EngineSettings) -> str | None:
        return None

    def groups(self, members: Sequence[MemberState]) -> list[list[int]]:
        return [[index] for index in range(len(members))]

    def make_part(self, members: Sequence[MemberState]) -> Part:
        return MemberPart(members, self.objective, self.settings)
