"""Members of one architecture as one network with stacked parameters.

Fastest where the overhead of many small operations rules: tiny members on a CPU, most members on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import (
    COUNTERS,
    Engine,
    OptimizerState,
    Settings,
    Slot,
    added,
    at_least_float32,
    sent_back,
)
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.flat_parameters import Parameters, clipped
from ensemblekit.members.stochastic import Noise, first_call, first_call_of_pass, noise_layers, noise_of_pass


class Cohort:
    """Slots of one architecture and age: their parameters (K, …) in one tensor each, with one optimizer.

    The networks' own parameters become views of the stacked ones, so that they are always up to date.
    """

    def __init__(self, slots: Sequence[Slot], engine: Engine) -> None:
        self.slots, self.engine = list(slots), engine
        self.frozen = slots[0].frozen
        self.skeleton = deepcopy(slots[0].network).to("meta")
        self.learning: list[Tensor] = []
        self.tensors = self._stacked_tensors()
        self.changing = [name for name, _ in self.skeleton.named_buffers()]
        self.noise = noise_layers(self.skeleton)
        self.noise_steps = [
            f"{name}.noise_step".lstrip(".")
            for name, layer in self.skeleton.named_modules()
            if isinstance(layer, Noise)
        ]
        self.step = 0
        self.outputs: Tensor | None = None
        self.inputs: Tensor | None = None
        self.second_inputs: Tensor | None = None
        self.second_pass = False
        self.gradients: Sequence[Tensor] = ()
        self.network = StackedNetwork(self.skeleton)
        self.call = torch.compile(self.network.__call__) if engine.settings.compile else self.network.__call__

    def _stacked_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers (K, …) by name; those that learn are given to an optimizer."""
        stacked = {
            name: torch.stack([_tensor(slot.network, name).detach() for slot in self.slots])
            for name, _ in [*self.skeleton.named_parameters(), *self.skeleton.named_buffers()]
        }
        if not self.frozen:
            names = [name for name, value in self.skeleton.named_parameters() if value.requires_grad]
            self.parameters = Parameters({name: stacked[name] for name in names}, self.engine.settings)
            self.parameters.load_state(_stacked_state(self.slots))
            stacked |= self.parameters.tensors
        for name, value in stacked.items():
            for slot, part in zip(self.slots, value, strict=True):
                _tensor(slot.network, name).data = part
        if not self.frozen:
            self.learning = [stacked[name].requires_grad_() for name in names]
        return stacked

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        """Outputs (K, B, C) in training, detached."""
        if self.frozen:
            self.second_inputs = inputs if self.engine.has_second_pass else None
            return self.predict(inputs)[0]
        if self.engine.has_second_pass:
            # each member has a gradient of its own for them
            inputs = inputs.expand(len(self.slots), *inputs.shape).detach().requires_grad_()
        return self._kept(inputs, step, second_pass=False)

    def forward_again(self) -> Tensor:
        """The same for the second inputs, which `backward` has made; those of frozen members are the first ones."""
        inputs, self.second_inputs = self.second_inputs, None
        assert inputs is not None
        return self.predict(inputs)[0] if self.frozen else self._kept(inputs, self.step, second_pass=True)

    def _kept(self, inputs: Tensor, step: int, second_pass: bool) -> Tensor:
        """Outputs, detached; what `backward` needs is kept."""
        keep_graph = not self.engine.settings.recompute
        with torch.set_grad_enabled(keep_graph):
            outputs = self.attached(inputs, step, second_pass)
        self.outputs = outputs if keep_graph else None
        self.inputs = inputs if inputs.requires_grad or not keep_graph else None
        return at_least_float32(outputs.detach())

    def attached(self, inputs: Tensor, step: int, second_pass: bool = False) -> Tensor:
        """Outputs (K, B, C) in training."""
        if not self.skeleton.training:
            self.skeleton.train()
        self.step, self.second_pass = step, second_pass
        self._set_noise_step(self.tensors)
        with self.engine.autocast():
            return self.call(self.tensors, inputs, not self.engine.has_second_pass)

    def _set_noise_step(self, tensors: dict[str, Tensor]) -> None:
        for name in self.noise_steps:
            tensors[name].fill_(first_call(self.step, self.second_pass))
        for layer in self.noise:
            layer.calls = 0

    def backward(self, gradient: Tensor) -> None:
        """Find the gradients of the stacked parameters from that of the outputs (K, B, C)."""
        outputs = self.outputs
        if outputs is None:
            assert self.inputs is not None
            scratch = self.tensors | {name: self.tensors[name].clone() for name in self.changing}
            self._set_noise_step(scratch)
            with self.engine.autocast():
                outputs = self.call(scratch, self.inputs, not self.engine.has_second_pass)
        found, of_inputs = sent_back(gradient, outputs, self.learning, self.inputs)
        if self.inputs is not None and of_inputs is not None:
            self.second_inputs = self.engine.objective.second_inputs(self.inputs.detach(), of_inputs)
        self.gradients = added(self.gradients, found)
        self.outputs = self.inputs = None

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer for all of them."""
        if self.frozen:
            return
        self.parameters.step(clipped(self.gradients, self.engine.settings.clip_norm), learning_rate)
        self.gradients = ()
        for slot in self.slots:
            slot.steps += 1

    def predict(self, inputs: Tensor, passes: int | None = None) -> Tensor:
        """Outputs (S, K, B, C) in evaluation of noisy passes, or (1, K, B, C) of one without noise."""
        self.skeleton.eval()
        with torch.no_grad(), self.engine.autocast():
            if passes is None:
                return at_least_float32(torch.stack([self.call(self.tensors, inputs)]))
            quiet, noisy = self.network.parted()
            features = quiet(self.tensors, inputs)
            outputs = []
            for number in range(passes):
                first = first_call_of_pass(number)
                steps = {name: torch.full_like(self.tensors[name], first) for name in self.noise_steps}
                with noise_of_pass(self.skeleton, number):
                    outputs.append(noisy(self.tensors | steps, features.clone(), not quiet.stacks))
            return at_least_float32(torch.stack(outputs))

    def store_optimizer_state(self) -> None:
        if self.frozen:
            return
        state = self.parameters.state()
        for place, slot in enumerate(self.slots):
            slot.optimizer_state = {
                name: {key: value if key in COUNTERS else value[place] for key, value in own.items()}
                for name, own in state.items()
            }


class StackedEngine(Engine):
    """All members of one architecture in one pass."""

    name = "stacked"

    def __init__(self, slots: Sequence[Slot], objective: Objective, settings: Settings) -> None:
        super().__init__(slots, objective, settings)
        groups: dict[Any, list[Slot]] = {}
        for slot in slots:
            # not the model itself, which cannot be hashed if a parameter is a list or a dict
            key = (type(slot.model), slot.model.model_dump_json(), slot.frozen, slot.steps)
            groups.setdefault(key, []).append(slot)
        self.cohorts = [Cohort(group, self) for group in groups.values()]

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        (only, *others) = self.cohorts
        if others or only.frozen or self.settings.recompute or self.has_second_pass:
            return super().train_step(batch, weights, learning_rate, step)
        # where one graph has all that learns, one pass goes back from the objective to the parameters
        outputs = at_least_float32(only.attached(batch.inputs, step))
        value = self.objective(outputs, batch.targets, weights)
        only.gradients = torch.autograd.grad(value, only.learning, materialize_grads=True)
        only.update(learning_rate)
        return value.detach(), outputs.detach()

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        cohorts = self._running_cohorts()
        return self._in_order(cohorts, [cohort.forward(inputs, step) for cohort in cohorts], self.running)

    def forward_again(self) -> Tensor:
        cohorts = self._running_cohorts()
        return self._in_order(cohorts, [cohort.forward_again() for cohort in cohorts], self.running)

    def _running_cohorts(self) -> list[Cohort]:
        run = {id(slot) for slot in self.running}
        return [cohort for cohort in self.cohorts if id(cohort.slots[0]) in run]

    def backward(self, gradient: Tensor) -> None:
        place = {id(slot): index for index, slot in enumerate(self.running)}
        for cohort in self.cohorts:
            if not cohort.frozen:
                cohort.backward(gradient[[place[id(slot)] for slot in cohort.slots]])

    def update(self, learning_rate: float) -> None:
        for cohort in self.cohorts:
            cohort.update(learning_rate)

    def predict(self, inputs: Tensor) -> Tensor:
        outputs = [cohort.predict(inputs, self.settings.passes).transpose(0, 1) for cohort in self.cohorts]
        return self._in_order(self.cohorts, outputs, self.slots).transpose(0, 1).flatten(0, 1)

    def store_optimizer_state(self) -> None:
        for cohort in self.cohorts:
            cohort.store_optimizer_state()

    @staticmethod
    def _in_order(cohorts: Sequence[Cohort], outputs: Sequence[Tensor], slots: Sequence[Slot]) -> Tensor:
        """The outputs of several cohorts in the order of the slots."""
        if len(cohorts) == 1:
            return outputs[0]
        rows = {
            id(slot): row
            for cohort, part in zip(cohorts, outputs, strict=True)
            for slot, row in zip(cohort.slots, part, strict=True)
        }
        return torch.stack([rows[id(slot)] for slot in slots])


def _tensor(network: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    path, _, last = name.rpartition(".")
    tensor: Tensor = getattr(network.get_submodule(path), last)
    return tensor


def _stacked_state(slots: Sequence[Slot]) -> OptimizerState:
    """The optimizer's state of several members of one age as that of their stacked parameters."""
    states = [slot.optimizer_state for slot in slots]
    return {
        name: {
            key: first[key] if key in COUNTERS else torch.stack([state[name][key] for state in states]) for key in first
        }
        for name, first in states[0].items()
    }
