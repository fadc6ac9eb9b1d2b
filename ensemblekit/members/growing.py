"""The members of an ensemble in training: life-cycle hooks may add, copy and freeze them, and checkpoints keep them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ensemblekit.core.errors import PluginError, RunError, UsageError
from ensemblekit.core.plugin import DataInfo, Model
from ensemblekit.members.build import build_member, build_members, check_independent, samples_in_passes, uses_global_rng
from ensemblekit.members.state import MemberState
from ensemblekit.spec.sections import Spec


class GrowingMembers:
    """The current members of a run; `changed` says whether they have changed since the last engine was made."""

    def __init__(self, spec: Spec, info: DataInfo, device: torch.device) -> None:
        self.spec, self.info, self.device = spec, info, device
        self.num_outputs = spec.loss.num_outputs(info)
        self.states: list[MemberState] = []
        self.num_built = 0
        self.changed = True
        self._uses_global_rng: dict[str, bool] = {}
        """Whether the networks of a model use torch's global random generator, by the model's key."""

    def check_stochastic(self) -> None:
        """Raise a `UsageError` if a model has no stochastic layer: all stochastic passes would be identical."""
        for model in {model.key: model for model in self.spec.member_models}.values():
            network = build_member(model, self.info.input_shape, self.num_outputs, self.spec.seed, member=0)
            if not samples_in_passes(network, self.info.input_shape):
                what = f'the method needs a stochastic model, but "{model.name}" has no dropout'
                raise UsageError(what, "model", "set model.dropout to more than 0, or use a model that has dropout")

    def check_supported(self, bf16: bool, single_samples: bool) -> None:
        """Raise an error if the models cannot be trained in this precision, or on batches of a single sample."""
        for model in self.spec.member_models:
            declared = model.unsupported()
            if not isinstance(declared, Mapping):
                what = f'model "{model.name}": unsupported() returned a {type(declared).__name__}'
                raise PluginError(what, "", 'return a dict: {"vmap": "why"}', plugin=model.name)
            if bf16 and (reason := declared.get("autocast")):
                what = f'model "{model.name}" does not support bf16: {reason}'
                raise UsageError(what, "engine.precision", 'set it to "float32"')
        if all(state.frozen for state in self.states):
            what = "no member has parameters to learn"
            raise UsageError(what, "model", "use a model with a layer that has parameters, such as nn.Linear")
        layers = [layer for state in self.states for layer in state.network.modules()]
        if single_samples and any(isinstance(layer, nn.BatchNorm1d) for layer in layers):
            what = "batch norm cannot be trained on a batch of a single sample"
            fix = "set training.batch_size (and data.limit_train, if that is 1) to at least 2"
            raise UsageError(what, "training.batch_size", fix)

    def start(self, size: int) -> None:
        """Build the first members."""
        models = self.spec.member_models[:size]
        networks = build_members(models, self.info.input_shape, self.num_outputs, self.spec.seed)
        self.states = [self._state(*pair, index) for index, pair in enumerate(zip(networks, models, strict=True))]
        self.num_built = size

    def __len__(self) -> int:
        return len(self.states)

    def grow(self) -> int:
        """Add a freshly initialised member at the end; returns its index."""
        if self.num_built >= len(self.spec.member_models):
            what = f"a method adds more than the {len(self.spec.member_models)} members of the spec"
            raise PluginError(what, "epoch_started", "raise ensemble.members", hook="epoch_started")
        state = self._build(self.num_built)
        check_independent(state.network, len(self.states), state.model, [other.network for other in self.states])
        self.states.append(state)
        self.num_built += 1
        self.changed = True
        return len(self.states) - 1

    def keep_copy(self, member: int) -> int:
        """Insert a frozen copy of a member just before it; returns the copy's index."""
        original = self.states[member]
        copy = MemberState(deepcopy(original.network), original.model, original.seed_index, True, original.steps)
        self.states.insert(member, copy)
        self.changed = True
        return member

    def freeze(self, member: int) -> None:
        """Stop training a member."""
        self.states[member].frozen = True
        self.states[member].optimizer_state = {}
        self.changed = True

    def _build(self, index: int) -> MemberState:
        model = self.spec.member_models[index]
        network = build_member(model, self.info.input_shape, self.num_outputs, self.spec.seed, index)
        return self._state(network, model, index)

    def _state(self, network: nn.Module, model: Model, index: int) -> MemberState:
        if model.key not in self._uses_global_rng:
            self._uses_global_rng[model.key] = uses_global_rng(network, self.info.input_shape)
        state = MemberState(network.to(self.device), model, index, uses_global_rng=self._uses_global_rng[model.key])
        state.frozen = not state.can_learn  # no optimizer accepts an empty list of parameters
        return state

    def network_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of all networks, by names that begin with `members.INDEX.`."""
        return {
            f"members.{index}.{name}": value.detach()
            for index, state in enumerate(self.states)
            for name, value in state.network.state_dict().items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that training changes: those of the networks and of the optimizers."""
        optimizers = {
            f"optimizer.{index}.{key}.{name}": value.detach()
            for index, state in enumerate(self.states)
            for name, values in state.optimizer_state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        return self.network_tensors() | optimizers

    def state(self) -> dict[str, Any]:
        """Return the rest of what training changes, as JSON."""
        return {
            "built": self.num_built,
            "slots": [
                {
                    "member": state.seed_index,
                    "frozen": state.frozen,
                    "steps": state.steps,
                    "optimizer": {
                        name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
                        for name, values in state.optimizer_state.items()
                    },
                }
                for state in self.states
            ],
        }

    def restore(self, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `state` returned; nothing changes if it does not fit."""
        states: list[MemberState] = []
        for index, values in enumerate(saved["slots"]):
            state = self._restored(index, values, tensors)
            check_independent(state.network, index, state.model, [other.network for other in states])
            states.append(state)
        self.states, self.num_built, self.changed = states, saved["built"], True

    def _restored(self, index: int, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MemberState:
        state = self._build(saved["member"])
        state.frozen, state.steps = saved["frozen"], saved["steps"]
        load_weights(state.network, state.model, tensors, f"members.{index}.")
        state.optimizer_state = {name: dict(values) for name, values in saved["optimizer"].items()}
        prefix, on_cpu = f"optimizer.{index}.", self.spec.optimizer.per_tensor_state
        for full_name, value in tensors.items():
            if full_name.startswith(prefix):
                key, _, name = full_name.removeprefix(prefix).partition(".")
                moved = value if key in on_cpu else value.to(self.device)
                state.optimizer_state.setdefault(name, {})[key] = moved
        return state


def load_weights(network: nn.Module, model: Model, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Load the saved weights whose names begin with `prefix`.

    Raises:
        RunError: a tensor is missing, unknown to the network or of another shape; nothing is loaded then.
    """
    saved = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    expected = network.state_dict()
    where, fix = f'model "{model.name}"', "the model's code or parameters must be those of the run"
    for name in sorted(saved.keys() ^ expected.keys()):
        which = "missing" if name in expected else "not part of this model"
        raise RunError(f"tensor {prefix}{name} is {which}", where, fix)
    for name, value in saved.items():
        if value.shape != expected[name].shape:
            what = f"tensor {prefix}{name} has shape {tuple(value.shape)}, expected {tuple(expected[name].shape)}"
            raise RunError(what, where, fix)
    network.load_state_dict(saved)
