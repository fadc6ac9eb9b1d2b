"""The members of an ensemble in training: what life-cycle hooks may grow, copy and freeze, and checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ensemblekit.core.errors import PluginError, RunError, UsageError
from ensemblekit.core.plugin import DataInfo, Model
from ensemblekit.engines.base import COUNTERS, Slot
from ensemblekit.members.build import build_member, build_members
from ensemblekit.members.stochastic import noise_layers, noise_of_pass
from ensemblekit.spec.sections import Spec


class TrainingMembers:
    """A list of slots that grows; `changed` says whether it has since the last engine was made."""

    def __init__(self, spec: Spec, info: DataInfo, num_outputs: int, device: torch.device) -> None:
        self.spec, self.info, self.num_outputs, self.device = spec, info, num_outputs, device
        self.slots: list[Slot] = []
        self.draws_globally: dict[tuple[type, str], bool] = {}
        self.built = 0
        self.changed = True

    def refuse_without_noise(self) -> None:
        """Raise an error for a model whose networks draw no random numbers: all their noisy passes would be equal."""
        for model in {_key(model): model for model in self.spec.member_models}.values():
            network = build_member(model, self.info.input_shape, self.num_outputs, self.spec.seed, member=0)
            if not draws_in_passes(network, self.info.input_shape):
                what = f'all passes of a prediction would be equal: networks of model "{model.name}" draw no numbers'
                raise UsageError(what, "model", "set model.dropout to more than 0, or use a model that has it")

    def refuse_if_impossible(self, bf16: bool, single_samples: bool) -> None:
        """Raise an error for what networks cannot learn in: a precision, or batches of a single sample."""
        for model in self.spec.member_models:
            declared = model.unsupported()
            if not isinstance(declared, Mapping):
                what = f'model "{model.name}": unsupported() returned a {type(declared).__name__}'
                raise PluginError(what, "", 'return a dict: {"vmap": "why"}')
            if bf16 and (reason := declared.get("autocast")):
                what = f'model "{model.name}" cannot compute in bf16: {reason}'
                raise UsageError(what, "engine.precision", 'set it to "float32"')
        layers = [layer for slot in self.slots for layer in slot.network.modules()]
        if single_samples and any(isinstance(layer, nn.BatchNorm1d) for layer in layers):
            what = "batch norm cannot learn from a batch of a single sample"
            fix = "set training.batch_size (and data.limit_train, if that is 1) to at least 2"
            raise UsageError(what, "training.batch_size", fix)

    def start(self, size: int) -> None:
        """Build the first members."""
        models = self.spec.member_models[:size]
        networks = build_members(models, self.info.input_shape, self.num_outputs, self.spec.seed)
        self.slots = [self._slot(*entry, member) for member, entry in enumerate(zip(networks, models, strict=True))]
        self.built = size

    def __len__(self) -> int:
        return len(self.slots)

    def grow(self) -> int:
        """Add a freshly initialised member at the end; returns its index."""
        if self.built >= len(self.spec.member_models):
            raise PluginError(
                f"a method wants more than the {len(self.spec.member_models)} members of the spec",
                "epoch_started",
                "raise ensemble.members",
            )
        self.slots.append(self._built(self.built))
        self.built += 1
        self.changed = True
        return len(self.slots) - 1

    def _built(self, member: int) -> Slot:
        model = self.spec.member_models[member]
        network = build_member(model, self.info.input_shape, self.num_outputs, self.spec.seed, member)
        return self._slot(network, model, member)

    def _slot(self, network: nn.Module, model: Model, member: int) -> Slot:
        key = _key(model)
        if key not in self.draws_globally:
            self.draws_globally[key] = draws_globally(network, self.info.input_shape)
        return Slot(network.to(self.device), model, member, draws_globally=self.draws_globally[key])

    def keep_copy(self, member: int) -> int:
        """Insert a frozen copy of a member just before it; returns the copy's index."""
        original = self.slots[member]
        self.slots.insert(
            member, Slot(deepcopy(original.network), original.model, original.member, True, original.steps)
        )
        self.changed = True
        return member

    def freeze(self, member: int) -> None:
        """Stop a member from learning."""
        self.slots[member].frozen = True
        self.slots[member].optimizer_state = {}
        self.changed = True

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by a name that says whose it is."""
        tensors = {}
        for place, slot in enumerate(self.slots):
            for name, value in slot.network.state_dict().items():
                tensors[f"members.{place}.{name}"] = value.detach()
            for name, state in slot.optimizer_state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{place}.{key}.{name}"] = value.detach()
        return tensors

    def state(self) -> dict[str, Any]:
        """The rest of it, as JSON."""
        return {
            "built": self.built,
            "slots": [
                {
                    "member": slot.member,
                    "frozen": slot.frozen,
                    "steps": slot.steps,
                    "optimizer": {
                        name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
                        for name, state in slot.optimizer_state.items()
                    },
                }
                for slot in self.slots
            ],
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Become what was saved; nothing changes if it does not fit."""
        slots = []
        for place, saved in enumerate(state["slots"]):
            slot = self._built(saved["member"])
            slot.frozen, slot.steps = saved["frozen"], saved["steps"]
            load_network(slot, tensors, f"members.{place}.")
            for name, numbers in saved["optimizer"].items():
                slot.optimizer_state[name] = dict(numbers)
            prefix = f"optimizer.{place}."
            for full_name, value in tensors.items():
                if full_name.startswith(prefix):
                    key, _, name = full_name.removeprefix(prefix).partition(".")
                    moved = value if key in COUNTERS else value.to(self.device)
                    slot.optimizer_state.setdefault(name, {})[key] = moved
            slots.append(slot)
        self.slots, self.built, self.changed = slots, state["built"], True


def _key(model: Model) -> tuple[type, str]:
    """Equal for equal models; a model itself cannot be hashed if a parameter is a list or a dict."""
    return type(model), model.model_dump_json()


def draws_globally(network: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a pass in training moves torch's global generator; the network stays as it is."""
    state = {name: value.detach().clone() for name, value in [*network.named_parameters(), *network.named_buffers()]}
    with torch.random.fork_rng(devices=()), torch.no_grad():
        before = torch.get_rng_state()
        functional_call(network, state, (torch.zeros(2, *input_shape),))
        return not torch.equal(before, torch.get_rng_state())


def draws_in_passes(network: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a noisy pass in evaluation draws any number; the network is then in evaluation."""
    with torch.no_grad(), noise_of_pass(network.eval(), 0):
        network(torch.zeros(1, *input_shape))
        return any(layer.calls for layer in noise_layers(network))


def load_network(slot: Slot, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Give a network its saved weights; an error names a tensor that is missing, left over or of another shape."""
    saved = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    expected = slot.network.state_dict()
    for name in sorted(saved.keys() ^ expected.keys()):
        which = "missing" if name in expected else "not of this model"
        raise RunError(
            f"tensor {prefix}{name} is {which}", f'model "{slot.model.name}"', "was the model changed since?"
        )
    for name, value in saved.items():
        if value.shape != expected[name].shape:
            what = f"tensor {prefix}{name} has shape {tuple(value.shape)}, expected {tuple(expected[name].shape)}"
            raise RunError(what, f'model "{slot.model.name}"', "was the model changed since?")
    slot.network.load_state_dict(saved)
