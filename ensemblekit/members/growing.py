"""The networks of an ensemble in training: hooks may add, copy and freeze members, and checkpoints keep them.

Members are counted as hooks see them: a family has several members in one network, auxiliary networks are not counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import PluginError, RunError, UsageError
from ensemblekit.core.plugin import Model
from ensemblekit.members.build import (
    build_network,
    check_independent,
    check_not_equal,
    samples_in_passes,
    uses_global_rng,
)
from ensemblekit.members.flat_parameters import flat_weights
from ensemblekit.members.layout import output_layout
from ensemblekit.members.state import MemberState
from ensemblekit.ranks.group import ALONE, Group
from ensemblekit.spec.sections import NetworkPlan, Spec


class GrowingMembers:
    """The current networks of a run; `changed` says whether they have changed since the last engine was made.

    Args:
        spec: what is trained.
        info: task and shapes of its data.
        device: where the networks are.
        keep_start: whether a method needs the weights that members start with.
        group: the processes that train them together.
        ranks: the process of each network, by the network's index; empty: all are in this one.
    """

    def __init__(
        self,
        spec: Spec,
        info: DataInfo,
        device: torch.device,
        keep_start: bool = False,
        group: Group = ALONE,
        ranks: Mapping[int, int] | None = None,
    ) -> None:
        self.spec, self.info, self.device, self.keep_start = spec, info, device, keep_start
        self.group, self.ranks = group, ranks or {}
        self.layout = output_layout(spec, info)
        self.plans = [plan for plan in spec.networks if plan.group.role == "member"]
        self.states: list[MemberState] = []
        """The networks of the members."""
        self.auxiliary: list[MemberState] = []
        self.num_built = 0
        """The number of members that were built so far."""
        self.changed = True
        self._uses_global_rng: dict[str, bool] = {}
        """Whether the networks of a model use torch's global random generator, by the model's key."""
        self._tried: set[Hashable] = set()

    @property
    def networks(self) -> list[MemberState]:
        """All networks: those of the members, then the auxiliary ones."""
        return [*self.states, *self.auxiliary]

    def __len__(self) -> int:
        return sum(state.size for state in self.states)

    @property
    def whereabouts(self) -> dict[str, Any]:
        """Where members are trained, for the record of a run: the rank of each network; empty for one process."""
        return {} if self.group.is_alone else {"ranks": [self.ranks[plan.index] for plan in self.spec.networks]}

    def check_stochastic(self) -> None:
        """Raise a `UsageError` if a model has no stochastic layer: all stochastic passes would be identical."""
        for plan in {plan.group.model.key: plan for plan in self.plans}.values():
            network = self._build(plan)
            if not samples_in_passes(network, self.info.input_shape):
                what = f'the method needs a stochastic model, but "{plan.group.model.name}" has no dropout'
                raise UsageError(what, "model", "set model.dropout to more than 0, or use a model that has dropout")

    def check_supported(self, bf16: bool, single_samples: bool) -> None:
        """Raise an error if the models cannot be trained in this precision, or on batches of a single sample."""
        for plan in self.spec.networks:
            model = plan.group.model
            declared = model.unsupported()
            if not isinstance(declared, Mapping):
                what = f'model "{model.name}": unsupported() returned a {type(declared).__name__}'
                raise PluginError(what, "", 'return a dict: {"vmap": "why"}', plugin=model.name)
            if bf16 and (reason := declared.get("autocast")):
                what = f'model "{model.name}" does not support bf16: {reason}'
                raise UsageError(what, "engine.precision", 'set it to "float32"')
        if all(state.frozen for state in self.networks):
            what = "no member has parameters to learn"
            raise UsageError(what, "model", "use a model with a layer that has parameters, such as nn.Linear")
        layers = [layer for state in self.networks for layer in state.network.modules()]
        if single_samples and any(isinstance(layer, nn.BatchNorm1d) for layer in layers):
            what = "batch norm cannot be trained on a batch of a single sample"
            fix = "set training.batch_size (and data.limit_train, if that is 1) to at least 2"
            raise UsageError(what, "training.batch_size", fix)

    def check_learning(self, epoch: int) -> None:
        """Raise a `PluginError` if methods have frozen every network."""
        if all(state.frozen for state in self.networks):
            what = f"every member is frozen at the start of epoch {epoch}, so that nothing is learned"
            raise PluginError(what, "epoch_started", "leave a member that learns", hook="epoch_started")

    def start(self, size: int) -> None:
        """Build the first members, and the auxiliary networks."""
        plans = [plan for plan in self.plans if plan.index < size]
        if sum(plan.members for plan in plans) != size:
            self._refuse_for_family("build only some of the members", plans[-1].group.model, plans[-1].members)
        auxiliary = [plan for plan in self.spec.networks if plan.group.role == "auxiliary"]
        networks = [self._build(plan) for plan in (*plans, *auxiliary)]
        models = [plan.group.model for plan in (*plans, *auxiliary)]
        for index, (network, model) in enumerate(zip(networks, models, strict=True)):
            check_independent(network, index, model, networks[:index])
        check_not_equal(list(zip(networks, models, strict=True))[: len(plans)])
        states = [self._state(*pair) for pair in zip(networks, (*plans, *auxiliary), strict=True)]
        self.states, self.auxiliary = states[: len(plans)], states[len(plans) :]
        self.num_built = size

    def _plan_at(self, member: int) -> NetworkPlan:
        return next(plan for plan in self.plans if plan.index <= member < plan.index + plan.members)

    def grow(self) -> int:
        """Add a freshly initialised member at the end; returns its index."""
        if self.num_built >= self.spec.ensemble.members:
            what = f"a method adds more than the {self.spec.ensemble.members} members of the spec"
            raise PluginError(what, "epoch_started", "raise ensemble.members", hook="epoch_started")
        plan = self._plan_at(self.num_built)
        if plan.members > 1:
            self._refuse_for_family("add a member", plan.group.model, plan.members)
        state = self._state(self._build(plan), plan)
        check_independent(state.network, len(self), state.model, [other.network for other in self.networks])
        self.states.append(state)
        self.num_built += 1
        self.changed = True
        return len(self) - 1

    def keep_copy(self, member: int) -> int:
        """Insert a frozen copy of a member just before it; returns the copy's index."""
        position = self._position(member, "copy")
        original = self.states[position]
        copy = replace(
            MemberState(deepcopy(original.network), original.model, original.seed_index, True, original.steps),
            rank=original.rank,
            is_here=original.is_here,
        )
        self.states.insert(position, copy)
        self.changed = True
        return member

    def freeze(self, member: int) -> None:
        """Stop training a member."""
        state = self.states[self._position(member, "freeze")]
        state.frozen = True
        state.optimizer_state = {}
        self.changed = True

    def drop(self, member: int) -> None:
        """Remove a member."""
        position = self._position(member, "remove")
        if len(self.states) == 1:
            raise PluginError("a method removes the last member", fix="keep at least one member")
        del self.states[position]
        self.changed = True

    def blend(self, member: int, other: int, share: float) -> None:
        """Move the weights and statistics of a member towards those of another, by a share of 0 to 1."""
        target, source = (self.states[self._position(index, "blend")] for index in (member, other))
        if target.model.key != source.model.key:
            what = f"members {member} and {other} have different models, so that their weights cannot be averaged"
            raise PluginError(what, "blend()", "blend members of one model")
        values: Mapping[str, Tensor] = source.network.state_dict()
        if source.rank != target.rank:
            values = self.group.broadcast_tensors(values if source.is_here else {}, source.rank)
        for name, value in target.network.state_dict().items() if target.is_here else ():
            if value.is_floating_point():
                value.lerp_(values[name].to(value), share)
            else:
                value.copy_(values[name])
        target.known.clear()
        self.changed = True  # an engine may hold copies of the weights

    def state_of(self, member: int) -> MemberState:
        """Return the network of a member, which is not in a family."""
        return self.states[self._position(member, "change")]

    def _position(self, member: int, action: str) -> int:
        """Return the position of a member's network; an error if there is no such member, or if it is in a family."""
        if not isinstance(member, int) or not 0 <= member < len(self):
            what = f"there is no member {member!r} to {action}: the ensemble has members 0 to {len(self) - 1}"
            raise PluginError(what, "epoch_started", "pass an index below len(ensemble)", hook="epoch_started")
        first = 0
        for position, state in enumerate(self.states):
            if member < first + state.size:
                if state.size > 1:
                    self._refuse_for_family(f"{action} a member", state.model, state.size)
                return position
            first += state.size
        raise AssertionError("unreachable")

    @staticmethod
    def _refuse_for_family(action: str, model: Model, size: int) -> None:
        what = f'a method has to {action} of "{model.name}", which computes {size} members in one network'
        raise UsageError(what, "method", "use a model whose members are networks of their own")

    def _build(self, plan: NetworkPlan) -> nn.Module:
        return build_network(plan, self.layout, self.info, self.spec.seed, self._tried)

    def _state(self, network: nn.Module, plan: NetworkPlan) -> MemberState:
        group = plan.group
        key, can_run = group.model.key, not group.model.knows_outputs
        if key not in self._uses_global_rng:
            self._uses_global_rng[key] = can_run and uses_global_rng(network, self.info.input_shape)
        rank = self.ranks.get(plan.index, 0)
        is_here = rank == self.group.rank or self.group.is_alone
        state = MemberState(
            network.to(self.device if is_here else "meta"),
            group.model,
            plan.index,
            uses_global_rng=self._uses_global_rng[key],
            size=plan.members,
            auxiliary=group.name if group.role == "auxiliary" else "",
            optimizer=group.optimizer,
            rank=rank,
            is_here=is_here,
        )
        state.frozen = group.model.fitted or not state.can_learn  # no optimizer accepts an empty list of parameters
        if self.keep_start and not state.frozen and is_here:
            learned = [value.detach() for value in network.parameters() if value.requires_grad]
            state.start = flat_weights([value.unsqueeze(0) for value in learned])[0]
        return state

    def network_tensors(self, states: Sequence[MemberState] | None = None) -> dict[str, Tensor]:
        """Return the parameters and buffers of networks of this process; names begin with `members.INDEX.`.

        Args:
            states: which networks; default: all.
        """
        return {
            f"members.{index}.{name}": value.detach()
            for index, state in enumerate(self.networks if states is None else states)
            if state.is_here
            for name, value in state.network.state_dict().items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that training changes: those of the networks and of the optimizers of this process."""
        optimizers = {
            f"optimizer.{index}.{key}.{name}": value.detach()
            for index, state in enumerate(self.networks)
            if state.is_here
            for name, values in state.optimizer_state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        return self.network_tensors() | optimizers

    def state(self) -> dict[str, Any]:
        """Return the rest of what training changes, of all processes, as JSON."""
        slots = [
            {
                "member": state.seed_index,
                "frozen": state.frozen,
                "steps": state.steps,
                "optimizer": {
                    name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
                    for name, values in state.optimizer_state.items()
                },
            }
            for state in self.networks
        ]
        by_rank = self.group.gather_json(slots)
        ranks = [0 if self.group.is_alone else state.rank for state in self.networks]
        return {"built": self.num_built, "slots": [by_rank[rank][index] for index, rank in enumerate(ranks)]}

    def restore(self, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `state` returned; nothing changes if it does not fit."""
        states: list[MemberState] = []
        for index, values in enumerate(saved["slots"]):
            state = self._restored(index, values, tensors)
            check_independent(state.network, index, state.model, [other.network for other in states])
            states.append(state)
        self.states = [state for state in states if not state.auxiliary]
        self.auxiliary = [state for state in states if state.auxiliary]
        self.num_built, self.changed = saved["built"], True

    def _restored(self, index: int, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MemberState:
        plan = next(plan for plan in self.spec.networks if plan.index == saved["member"])
        state = self._state(self._build(plan), plan)
        state.frozen, state.steps = saved["frozen"], saved["steps"]
        if not state.is_here:
            return state
        load_weights(state.network, state.model, tensors, f"members.{index}.")
        state.optimizer_state = {name: dict(values) for name, values in saved["optimizer"].items()}
        prefix, on_cpu = f"optimizer.{index}.", (state.optimizer or self.spec.optimizer).per_tensor_state
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
        if value.shape != expected[name].shape and not model.fitted:
            what = f"tensor {prefix}{name} has shape {tuple(value.shape)}, expected {tuple(expected[name].shape)}"
            raise RunError(what, where, fix)
    if not model.fitted:
        network.load_state_dict(saved)
        return
    for name, value in saved.items():  # a fitted member has buffers of the sizes that the data gave them
        path, _, last = name.rpartition(".")
        network.get_submodule(path).register_buffer(last, value.to(expected[name].device))
