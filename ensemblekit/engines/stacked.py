"""Members of one architecture as one network with stacked parameters.

Fastest where the overhead of many small operations dominates: tiny members on a CPU, most members on a GPU. On a CPU,
stacks of few parameters are computed by a single thread, which never waits for another one; chains of linear layers are
computed by compiled code, whose threads do not wait for each other within a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn

from ensemblekit.core.misuse import find_misuse
from ensemblekit.core.objective import START, Moment, Objective
from ensemblekit.core.outputs import pad
from ensemblekit.core.plugin import Family
from ensemblekit.core.threads import one_thread
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine
from ensemblekit.engines.compiled_chain import CompiledChain, compiled_chain
from ensemblekit.engines.explicit_chain import ExplicitChain, explicit_chain
from ensemblekit.engines.part import Part, Samples, at_least_float32, backpropagate, sum_gradients
from ensemblekit.engines.sequential import MemberPart
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.flat_parameters import FlatParameters, is_shared
from ensemblekit.members.state import MemberState, OptimizerState
from ensemblekit.members.stochastic import (
    StochasticLayer,
    first_call,
    first_call_of_pass,
    stochastic_layers,
    stochastic_pass,
)

PARAMETERS_FOR_THREADS = 500_000
"""A stack with fewer parameters is computed by one thread on a CPU: several would gain little on an idle machine, and
on a busy one they would wait for each other at the end of each operation."""


Threads = Callable[[], AbstractContextManager[None]]


class Stack(Part):
    """K members of one architecture and age: each parameter of all of them is one tensor (K, …), with one optimizer.

    The parameters of the members' networks become views of the stacked ones, so that they are always up to date.
    """

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        super().__init__(members, objective, settings)
        # a copy without values: its structure says how to compute, the stacked tensors with which parameters
        self.skeleton = deepcopy(members[0].network).to("meta")
        self.learned: list[Tensor] = []
        self.tensors = self._stack_tensors()
        self.buffer_names = [name for name, _ in self.skeleton.named_buffers()]
        self.stochastic_layers = stochastic_layers(self.skeleton)
        self.step_names = [
            f"{name}.noise_step".lstrip(".")
            for name, layer in self.skeleton.named_modules()
            if isinstance(layer, StochasticLayer)
        ]
        self.step = 0
        self.outputs: Tensor | None = None
        self.inputs: Tensor | None = None
        self.second_inputs: Tensor | None = None
        self.in_second_pass = False
        self.shared = self.keys is None and not objective.members.have_second_inputs
        """Whether all members have the same inputs in training."""
        self.network = StackedNetwork(self.skeleton)
        self.call = torch.compile(self.network.__call__) if settings.compile else self.network.__call__
        self.chain = self._chain()
        """Computes training steps without autograd, if the network allows it."""
        self.chain_has_run = False
        """Whether it has computed the last outputs."""
        self.num_outputs = 0
        self.is_stored = False
        """Whether the members' states have the optimizer's state after the last step."""

    def _chain(self) -> CompiledChain | ExplicitChain | None:
        settings = self.settings
        if self.frozen or settings.compile or settings.bf16 or settings.recompute:
            return None
        gradients = None if self.objective.members.have_second_inputs else self.parameters.gradients()
        if gradients is None:
            return None
        layers = (self.network, self.tensors, gradients)
        return compiled_chain(*layers) or explicit_chain(*layers)

    def _stack_tensors(self) -> dict[str, Tensor]:
        """Stack parameters and buffers to (K, …) by name, and give those that are learned to an optimizer."""
        stacked = {
            name: torch.stack([_tensor(member.network, name).detach() for member in self.members])
            for name, _ in [*self.skeleton.named_parameters(), *self.skeleton.named_buffers()]
        }
        if not self.frozen:
            names = [name for name, value in self.skeleton.named_parameters() if value.requires_grad]
            self.parameters = FlatParameters({name: stacked[name] for name in names}, self.optimizer)
            self.parameters.load_state(self._stack_optimizer_state())
            stacked |= self.parameters.tensors
        for name, value in stacked.items():
            for member, row in zip(self.members, value, strict=True):
                _tensor(member.network, name).data = row
        if not self.frozen:
            self.learned = [stacked[name].requires_grad_() for name in names]
        return stacked

    def _stack_optimizer_state(self) -> OptimizerState:
        states = [member.optimizer_state for member in self.members]
        shared = self.optimizer.per_tensor_state
        return {
            name: {
                key: value if is_shared(key, value, shared) else torch.stack([state[name][key] for state in states])
                for key, value in first.items()
            }
            for name, first in states[0].items()
        }

    @property
    def learned_rows(self) -> list[Tensor]:
        return self.learned

    @property
    def buffers(self) -> list[Tensor]:
        return [self.tensors[name] for name in self.buffer_names]

    def gradient_rows(self) -> Sequence[Tensor]:
        return self.gradients

    def forward(self, batch: Batch, step: int) -> Tensor:
        if self.frozen:
            self.second_inputs = batch.inputs
            return self.predict(batch.inputs, samples=Samples("train", batch.index))[0]
        inputs = self.views(batch.inputs, step)
        if self.objective.members.have_second_inputs:
            # each member has its own gradient with respect to the inputs
            inputs = inputs.expand(len(self.members), *inputs.shape) if self.keys is None else inputs
            inputs = inputs.detach().requires_grad_()
        return self._forward(inputs, step, in_second_pass=False)

    def forward_second(self) -> Tensor:
        assert self.second_inputs is not None
        if self.frozen:
            return self.predict(self.second_inputs)[0]
        return self._forward(self.second_inputs, self.step, in_second_pass=True)

    def _forward(self, inputs: Tensor, step: int, in_second_pass: bool) -> Tensor:
        self.chain_has_run = self.chain is not None and self.chain.accepts(inputs, self.shared)
        if self.chain is not None and self.chain_has_run:
            self._prepare(step, in_second_pass)
            outputs = self.chain.forward(inputs, self.shared)
            self.num_outputs = outputs.shape[-1]
            return pad(outputs, self.settings.width)
        keep_graph = not self.settings.recompute
        with torch.set_grad_enabled(keep_graph):
            outputs = self.attached_outputs(inputs, step, in_second_pass)
        self.outputs = outputs if keep_graph else None
        self.inputs = inputs if inputs.requires_grad or not keep_graph else None
        return at_least_float32(outputs.detach())

    def attached_outputs(self, inputs: Tensor, step: int, in_second_pass: bool = False) -> Tensor:
        """Compute the outputs (K, B, C) in training mode, attached to the graph of the parameters."""
        self._prepare(step, in_second_pass)
        with self.settings.autocast():
            return pad(self.call(self.tensors, inputs, self.shared), self.settings.width)

    def _prepare(self, step: int, in_second_pass: bool) -> None:
        """Prepare the layers for a training step."""
        if not self.skeleton.training:
            self.skeleton.train()
        self.step, self.in_second_pass = step, in_second_pass
        self._set_training_step(self.tensors)

    def _set_training_step(self, tensors: dict[str, Tensor]) -> None:
        for name in self.step_names:
            tensors[name].fill_(first_call(self.step, self.in_second_pass))
        for layer in self.stochastic_layers:
            layer.calls = 0

    def backward(self, gradient: Tensor) -> None:
        if self.frozen:
            return
        if self.chain is not None and self.chain_has_run:
            self.chain.backward(gradient[..., : self.num_outputs])
            self.gradients = self.parameters.gradient_views
            return
        outputs = self.outputs
        if outputs is None:
            assert self.inputs is not None
            # copies of the buffers, so that batch-norm statistics count a batch once
            scratch = self.tensors | {name: self.tensors[name].clone() for name in self.buffer_names}
            self._set_training_step(scratch)
            with self.settings.autocast():
                outputs = pad(self.call(scratch, self.inputs, self.shared), self.settings.width)
        gradients, input_gradient = backpropagate(gradient, outputs, self.learned, self.inputs)
        if self.inputs is not None and input_gradient is not None:
            self.second_inputs = self.objective.members.second_inputs(self.inputs.detach(), input_gradient)
        self.gradients = sum_gradients(self.gradients, gradients)
        self.outputs = self.inputs = None

    def take_step(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        self.parameters.step(gradients, learning_rate)
        self.is_stored = False

    def compute(self, inputs: Tensor, passes: int | None) -> Tensor:
        self.skeleton.eval()
        shared = self.keys is None
        with torch.no_grad(), self.settings.autocast():
            if passes is None:
                return self.call(self.tensors, inputs, shared).unsqueeze(0)
            # layers before the first stochastic one give the same in all passes, and run once
            deterministic, stochastic = self.network.split_at_first_stochastic()
            features = deterministic(self.tensors, inputs, shared)
            shared = shared and not deterministic.stacks
            outputs = []
            for number in range(passes):
                first = first_call_of_pass(number)
                steps = {name: torch.full_like(self.tensors[name], first) for name in self.step_names}
                with stochastic_pass(self.skeleton, number):
                    outputs.append(stochastic(self.tensors | steps, features.clone(), shared))
            return torch.stack(outputs)

    def store_optimizer_state(self) -> None:
        if self.frozen or self.is_stored:
            return
        state, shared = self.parameters.state(), self.optimizer.per_tensor_state
        for row, member in enumerate(self.members):
            member.optimizer_state = {
                name: {key: value if is_shared(key, value, shared) else value[row] for key, value in values.items()}
                for name, values in state.items()
            }
        self.is_stored = True


class StackedEngine(Engine):
    """Computes all members of one architecture in one pass."""

    name = "stacked"
    # a stack's parts are few, and the objective of all of them at once takes fewer operations
    separates = False

    def __init__(self, members: Sequence[MemberState], objective: Objective, settings: EngineSettings) -> None:
        super().__init__(members, objective, settings)
        num_parameters = sum(value.numel() for member in self.members for value in member.network.parameters())
        on_cpu, is_small = settings.device.type == "cpu", num_parameters < PARAMETERS_FOR_THREADS
        self.threads_of_prediction: Threads = one_thread if on_cpu and is_small else nullcontext
        """Over how many threads torch spreads an operation; compiled code has threads of its own."""
        is_compiled = all(isinstance(part, Stack) and isinstance(part.chain, CompiledChain) for part in self.parts)
        self.limits_threads = on_cpu and (is_small or is_compiled)
        self.threads_of_step: Threads = one_thread if self.limits_threads else nullcontext

    @classmethod
    def unsupported(cls, members: Sequence[MemberState], settings: EngineSettings) -> str | None:
        for member in members:
            optimizer = member.optimizer or settings.optimizer
            if not optimizer.elementwise:
                name = optimizer.name
                return f'the optimizer "{name}" is not known to be element-wise, so it needs every parameter by itself'
            if not _is_alone(member) and (reason := member.model.unsupported().get("vmap")):
                return f'model "{member.model.name}": {reason}'
        return None

    def groups(self, members: Sequence[MemberState]) -> list[list[int]]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, member in enumerate(members):
            alone = index if _is_alone(member) else None
            optimizer = None if member.optimizer is None else str(member.optimizer.to_table())
            key = (member.model.key, optimizer, member.auxiliary, member.frozen, member.steps, alone)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def make_part(self, members: Sequence[MemberState]) -> Part:
        if _is_alone(members[0]):
            return MemberPart(members, self.objective, self.settings)
        return Stack(members, self.objective, self.settings)

    def _predict_here(self, inputs: Tensor, samples: Samples | None) -> Tensor:
        with self.threads_of_prediction():
            return super()._predict_here(inputs, samples)

    def train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment = START
    ) -> tuple[Tensor, Tensor]:
        with self.threads_of_step():
            return self._train_step(batch, weights, learning_rate, step, moment)

    def _train_step(
        self, batch: Batch, weights: Tensor | None, learning_rate: float, step: int, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        if not self.settings.group.is_alone:
            return super().train_step(batch, weights, learning_rate, step, moment)
        stack, *others = self.parts
        hooks = self.objective.members
        has_second_pass = hooks.have_second_inputs or hooks.have_second_weights
        if others or not isinstance(stack, Stack) or stack.frozen or self.settings.recompute or has_second_pass:
            return super().train_step(batch, weights, learning_rate, step, moment)
        if stack.chain is not None and stack.chain.accepts(batch.inputs, stack.shared):
            return super().train_step(batch, weights, learning_rate, step, moment)
        # A shortcut of the step algorithm for a single stack: one backward pass from the objective to the parameters,
        # without a leaf in between. It saves about ten operations a step.
        outputs = at_least_float32(stack.attached_outputs(stack.views(batch.inputs, step), step))
        value = self.objective(
            outputs, batch.targets, weights, None, stack.indices, moment, batch.mix, batch.importance
        )
        try:
            stack.gradients = torch.autograd.grad(value, stack.learned, materialize_grads=True)
        except RuntimeError as error:  # a hook that has called backward() is seen only here
            raise find_misuse(self.objective, outputs, batch.targets) or error from error
        stack.update(learning_rate, moment)
        return value.detach(), outputs.detach()


def _is_alone(member: MemberState) -> bool:
    """Whether a network is not stacked with others: it has nothing to stack, or is a stack of members itself."""
    network = member.network
    has_no_tensors = next(network.parameters(), None) is None and next(network.buffers(), None) is None
    return has_no_tensors or isinstance(member.model, Family) or member.model.fitted


def _tensor(network: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of that name."""
    path, _, last = name.rpartition(".")
    tensor: Tensor = getattr(network.get_submodule(path), last)
    return tensor
