"""One member after the other: the reference, simple and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine, Settings, Slot, added, at_least_float32, sent_back
from ensemblekit.members.flat_parameters import Parameters, clipped
from ensemblekit.members.stochastic import noise_layers, outputs_of_passes, set_noise_step


class MemberRunner:
    """One member with its own optimizer; what a thread, or the loop, works on."""

    def __init__(self, slot: Slot, engine: Engine) -> None:
        self.slot, self.engine = slot, engine
        self.network = slot.network
        self.call: Callable[[Tensor], Tensor] = torch.compile(slot.network) if engine.settings.compile else slot.network
        self.noise = noise_layers(slot.network)
        self.outputs: Tensor | None = None
        self.inputs: Tensor | None = None
        self.second_inputs: Tensor | None = None
        self.gradients: Sequence[Tensor] = ()
        self.step = 0
        self.second_pass = False
        if not slot.frozen:
            self.learning = {name: value for name, value in self.network.named_parameters() if value.requires_grad}
            self.parameters = Parameters(self.learning, engine.settings)
            self.parameters.load_state(slot.optimizer_state)
            for name, value in self.learning.items():
                value.data = self.parameters.tensors[name]

    def forward(self, inputs: Tensor, step: int, second_pass: bool = False) -> Tensor:
        """Outputs (B, C) in training, detached; a frozen member runs as in evaluation."""
        if self.slot.frozen:
            self.second_inputs = inputs if self.engine.has_second_pass and not second_pass else None
            return self.predict(inputs)[0]
        if not self.network.training:
            self.network.train()
        self.step, self.second_pass = step, second_pass
        set_noise_step(self.noise, step, second_pass)
        keep_graph = not self.engine.settings.recompute
        if self.engine.has_second_pass and not second_pass:
            inputs = inputs.detach().requires_grad_()
        with torch.set_grad_enabled(keep_graph), self.engine.autocast():
            outputs = self.call(inputs)
        self.outputs = outputs if keep_graph else None
        self.inputs = inputs if inputs.requires_grad or not keep_graph else None
        return at_least_float32(outputs.detach())

    def forward_again(self) -> Tensor:
        """The same for the second inputs, which `backward` has made; a frozen member's are the first ones."""
        inputs, self.second_inputs = self.second_inputs, None
        assert inputs is not None
        return self.forward(inputs, self.step, second_pass=True)

    def backward(self, gradient: Tensor) -> None:
        """Find the gradients of the parameters from that of the outputs (B, C)."""
        if self.slot.frozen:
            return
        outputs = self.outputs
        updated: list[tuple[Tensor, Tensor]] = []
        if outputs is None:
            assert self.inputs is not None
            updated = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
            set_noise_step(self.noise, self.step, self.second_pass)
            with self.engine.autocast():
                outputs = self.call(self.inputs)
        found, of_inputs = sent_back(gradient, outputs, list(self.learning.values()), self.inputs)
        if self.inputs is not None and of_inputs is not None:
            self.second_inputs = self.engine.objective.second_inputs(self.inputs.detach(), of_inputs)
        self.gradients = added(self.gradients, found)
        for buffer, value in updated:
            buffer.copy_(value)  # statistics count the batch once, not twice
        self.outputs = self.inputs = None

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer."""
        if self.slot.frozen:
            return
        if (largest := self.engine.settings.clip_norm) is not None:
            as_one_of_one = [gradient.unsqueeze(0) for gradient in self.gradients]
            self.gradients = [gradient[0] for gradient in clipped(as_one_of_one, largest)]
        self.parameters.step(self.gradients, learning_rate)
        self.gradients = ()
        self.slot.steps += 1

    def predict(self, inputs: Tensor, passes: int | None = None) -> Tensor:
        """Outputs (S, B, C) in evaluation of noisy passes, or (1, B, C) of one without noise."""
        self.network.eval()
        with torch.no_grad(), self.engine.autocast():
            if passes is None:
                return at_least_float32(torch.stack([self.call(inputs)]))
            return at_least_float32(outputs_of_passes(self.network, inputs, passes))

    def train_apart(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        """A whole step of this member of a separable objective; returns its part of it and its outputs (B, C)."""
        part, outputs = self._learn(self.forward(batch.inputs, step), batch, weights)
        if self.engine.has_second_pass:
            part = part + self._learn(self.forward_again(), batch, weights)[0]
        self.update(learning_rate)
        return part, outputs

    def _learn(self, outputs: Tensor, batch: Batch, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        # a copy: what a frozen member predicts may be a tensor of inference mode, which can have no gradient
        leaf = torch.stack([outputs]).requires_grad_()
        part = self.engine.objective(leaf, batch.targets, weights, ensemble_size=len(self.engine.running))
        (gradient,) = torch.autograd.grad(part, leaf)
        self.backward(gradient[0])
        return part.detach(), leaf.detach()[0]

    def store_optimizer_state(self) -> None:
        if not self.slot.frozen:
            self.slot.optimizer_state = self.parameters.state()


class SequentialEngine(Engine):
    """Members take turns; each uses all threads of the machine."""

    name = "sequential"

    def __init__(self, slots: Sequence[Slot], objective: Objective, settings: Settings) -> None:
        super().__init__(slots, objective, settings)
        self.runners = {id(slot): self.make_runner(slot) for slot in slots}

    def make_runner(self, slot: Slot) -> MemberRunner:
        """What runs a slot's member."""
        return MemberRunner(slot, self)

    def each(self, work: Callable[[MemberRunner, int], Any], slots: Sequence[Slot]) -> list[Any]:
        """Do the work for every slot; it is given the slot's runner and place."""
        return [work(self.runners[id(slot)], place) for place, slot in enumerate(slots)]

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return torch.stack(self.each(lambda runner, _: runner.forward(inputs, step), self.running))

    def forward_again(self) -> Tensor:
        return torch.stack(self.each(lambda runner, _: runner.forward_again(), self.running))

    def backward(self, gradient: Tensor) -> None:
        self.each(lambda runner, place: runner.backward(gradient[place]), self.running)

    def update(self, learning_rate: float) -> None:
        self.each(lambda runner, _: runner.update(learning_rate), self.running)

    def predict(self, inputs: Tensor) -> Tensor:
        passes = self.settings.passes
        return torch.stack(self.each(lambda runner, _: runner.predict(inputs, passes), self.slots), dim=1).flatten(0, 1)

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        if not self.objective.separable:
            return super().train_step(batch, weights, learning_rate, step)

        def work(runner: MemberRunner, place: int) -> tuple[Tensor, Tensor]:
            own = None if weights is None else weights[:, place : place + 1]
            return runner.train_apart(batch, own, learning_rate, step)

        parts, outputs = zip(*self.each(work, self.running), strict=True)
        return torch.stack(parts).sum(), torch.stack(outputs)

    def store_optimizer_state(self) -> None:
        self.each(lambda runner, _: runner.store_optimizer_state(), self.slots)
