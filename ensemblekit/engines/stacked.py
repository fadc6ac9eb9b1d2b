"""Members of one architecture as one network with stacked parameters, by `torch.func`.

Fastest where the overhead of many small operations rules: tiny members on a CPU, most members on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ensemblekit.engines.base import (
    COUNTERS,
    Engine,
    Settings,
    Slot,
    at_least_float32,
    load_optimizer_state,
    set_learning_rate,
)
from ensemblekit.noise import CALLS_PER_STEP, Noise
from ensemblekit.objectives import Objective


class Cohort:
    """Slots of one architecture and age: their parameters (K, …) in one tensor each, with one optimizer.

    The networks' own parameters become views of the stacked ones, so that they are always up to date.
    """

    def __init__(self, slots: Sequence[Slot], engine: Engine) -> None:
        self.slots, self.engine = list(slots), engine
        self.frozen = slots[0].frozen
        self.skeleton = deepcopy(slots[0].network)
        networks = [slot.network for slot in slots]
        self.parameters = {name: _stack(networks, name) for name, _ in self.skeleton.named_parameters()}
        self.buffers = {name: _stack(networks, name) for name, _ in self.skeleton.named_buffers()}
        self.noise_steps = [
            f"{name}.noise_step".lstrip(".")
            for name, layer in self.skeleton.named_modules()
            if isinstance(layer, Noise)
        ]
        self.step = 0
        self.outputs: Tensor | None = None
        self.inputs: Tensor | None = None
        self.call = vmap(self._one, in_dims=(0, 0, None), randomness="different")
        if engine.settings.compile:
            self.call = torch.compile(self.call)
        if not self.frozen:
            for parameter in self.parameters.values():
                parameter.requires_grad_()
            self.optimizer = engine.settings.build_optimizer(list(self.parameters.values()))
            load_optimizer_state(self.optimizer, list(self.parameters), _stacked_state(self.slots))

    def _one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.skeleton, (parameters, buffers), (inputs,))
        return outputs

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        """Outputs (K, B, C) in training, detached."""
        if self.frozen:
            return self.predict(inputs)
        self.skeleton.train()
        self.step = step
        self._set_noise_step(self.buffers)
        keep_graph = not self.engine.settings.recompute
        with torch.set_grad_enabled(keep_graph), self.engine.autocast():
            outputs = self.call(self.parameters, self.buffers, inputs)
        self.outputs, self.inputs = (outputs, None) if keep_graph else (None, inputs)
        return at_least_float32(outputs.detach())

    def _set_noise_step(self, buffers: dict[str, Tensor]) -> None:
        for name in self.noise_steps:
            buffers[name].fill_(self.step * CALLS_PER_STEP)

    def backward(self, gradient: Tensor) -> None:
        """Accumulate the gradient of the stacked parameters from that of the outputs (K, B, C)."""
        if self.frozen:
            return
        outputs = self.outputs
        if outputs is None:
            assert self.inputs is not None
            scratch = {name: buffer.clone() for name, buffer in self.buffers.items()}
            self._set_noise_step(scratch)
            with self.engine.autocast():
                outputs = self.call(self.parameters, scratch, self.inputs)
        torch.autograd.backward([outputs], [gradient.to(outputs.dtype)])
        self.outputs = self.inputs = None

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer for all of them."""
        if self.frozen:
            return
        if self.engine.settings.clip_norm is not None:
            self._clip(self.engine.settings.clip_norm)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for slot in self.slots:
            slot.steps += 1

    def _clip(self, largest: float) -> None:
        """Scale each member's gradient to a norm of at most `largest`, as `clip_grad_norm_` does for one."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        scale = (largest / (norms + 1e-6)).clamp_max(1)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))

    def predict(self, inputs: Tensor) -> Tensor:
        """Outputs (K, B, C) in evaluation."""
        self.skeleton.eval()
        with torch.no_grad(), self.engine.autocast():
            return at_least_float32(self.call(self.parameters, self.buffers, inputs))

    def store_optimizer_state(self) -> None:
        if self.frozen:
            return
        for place, slot in enumerate(self.slots):
            slot.optimizer_state = {
                name: {
                    key: value if key in COUNTERS else value[place]
                    for key, value in self.optimizer.state[parameter].items()
                }
                for name, parameter in self.parameters.items()
                if parameter in self.optimizer.state
            }


class StackedEngine(Engine):
    """All members of one architecture in one pass."""

    name = "stacked"

    def __init__(self, slots: Sequence[Slot], objective: Objective, settings: Settings) -> None:
        super().__init__(slots, objective, settings)
        groups: dict[Any, list[Slot]] = {}
        for slot in slots:
            groups.setdefault((slot.model, slot.frozen, slot.steps), []).append(slot)
        self.cohorts = [Cohort(group, self) for group in groups.values()]

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        run = {id(slot) for slot in self.running}
        cohorts = [cohort for cohort in self.cohorts if id(cohort.slots[0]) in run]
        return self._in_order(cohorts, [cohort.forward(inputs, step) for cohort in cohorts], self.running)

    def backward(self, gradient: Tensor) -> None:
        place = {id(slot): index for index, slot in enumerate(self.running)}
        for cohort in self.cohorts:
            if not cohort.frozen:
                cohort.backward(gradient[[place[id(slot)] for slot in cohort.slots]])

    def update(self, learning_rate: float) -> None:
        for cohort in self.cohorts:
            cohort.update(learning_rate)

    def predict(self, inputs: Tensor) -> Tensor:
        return self._in_order(self.cohorts, [cohort.predict(inputs) for cohort in self.cohorts], self.slots)

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


def _stack(networks: Sequence[nn.Module], name: str) -> Tensor:
    """One tensor (K, …) of a parameter or buffer of all networks, which become views of it."""
    path, _, last = name.rpartition(".")
    owners = [network.get_submodule(path) for network in networks]
    stacked = torch.stack([getattr(owner, last).detach() for owner in owners])
    for owner, part in zip(owners, stacked, strict=True):
        getattr(owner, last).data = part
    return stacked


def _stacked_state(slots: Sequence[Slot]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of several members of one age as that of their stacked parameters."""
    states = [slot.optimizer_state for slot in slots]
    return {
        name: {
            key: first[key] if key in COUNTERS else torch.stack([state[name][key] for state in states]) for key in first
        }
        for name, first in states[0].items()
    }
