"""The ensemble as life-cycle hooks see it: members, their outputs for the training data, and their sample weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemblekit.core.errors import PluginError
from ensemblekit.core.losses import Loss
from ensemblekit.core.plugin import Method
from ensemblekit.members.growing import GrowingMembers

if TYPE_CHECKING:
    from ensemblekit.training.trainer import Trainer

SAMPLE_WEIGHTS = "training.sample_weights"
"""The name of sample weights in a checkpoint, if a method has set them."""


class EnsembleInTraining:
    """What a life-cycle hook may see of the ensemble and do to it: a `GrowingEnsemble`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def members(self) -> GrowingMembers:
        """The networks."""
        return self._trainer.members

    def __len__(self) -> int:
        return len(self.members)

    def grow(self) -> int:
        """Add a freshly initialised member at the end; returns its index."""
        index = self.members.grow()
        self._trainer.fit_members()
        return index

    def keep_copy(self, member: int) -> int:
        """Insert a frozen copy of a member just before it; returns the copy's index."""
        return self.members.keep_copy(member)

    def freeze(self, member: int) -> None:
        """Stop training a member."""
        self.members.freeze(member)

    def drop(self, member: int) -> None:
        """Remove a member."""
        self.members.drop(member)

    def blend(self, member: int, other: int, share: float) -> None:
        """Move the weights and statistics of a member towards those of another, by a share of 0 to 1."""
        self.members.blend(member, other, share)

    def refresh_statistics(self, member: int) -> None:
        """Compute the batch-norm statistics of a member anew, as cumulative means over the training data."""
        state = self.members.state_of(member)
        norms = [layer for layer in state.network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self.members.changed = self.members.changed or bool(norms)
        if not norms or not state.is_here:
            return
        momenta = [norm.momentum for norm in norms]
        state.network.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative mean
            norm.train()
        with torch.no_grad():
            for batch in self._trainer.data.train.batches(self._trainer.spec.training.batch_size):
                state.network(batch.inputs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        state.known.clear()

    @property
    def targets(self) -> Tensor:
        """The training targets: class indices (N,), or real values (N, C) as the networks learn them."""
        return self._trainer.data.train.targets

    @property
    def loss(self) -> Loss:
        """The loss of the run, which defines what outputs mean."""
        return self._trainer.objective.loss

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Compute the current members' outputs (M, N, C) for the training data, in evaluation mode, not augmented."""
        trainer = self._trainer
        engine = trainer.engine.current()
        outputs = engine.predict_split("train", trainer.data.train.batches(trainer.evaluator.batch_size))
        return trainer.objective.predictions(outputs, trainer.evaluator.passes)

    @property
    def sample_weights(self) -> Tensor | None:
        """The weights (N, M) of the training samples for all members of the spec; None: all 1."""
        return self._trainer.weights

    def set_sample_weights(self, weights: Tensor) -> None:
        """Weight the training samples from now on, (N, M) for all members of the spec."""
        shape = (len(self.targets), self._trainer.spec.ensemble.members)
        valid = isinstance(weights, Tensor) and weights.is_floating_point() and tuple(weights.shape) == shape
        if not valid or not bool((weights.isfinite() & (weights >= 0)).all()):
            got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            what = f"a method sets sample weights that cannot be used: {got}"
            raise PluginError(what, "set_sample_weights()", f"give finite weights of at least 0 of shape {shape}")
        self._trainer.weights = weights.detach().to(self._trainer.device, torch.float32)
        self._trainer.weights_were_set = True


def method_tensors(methods: Sequence[Method]) -> dict[str, Tensor]:
    """Return the tensors that methods remember, by names that begin with `methods.NAME.`."""
    return {
        f"methods.{method.name}.{key}": value.detach()
        for method in methods
        for key, value in _state(method).items()
        if isinstance(value, Tensor)
    }


def method_values(methods: Sequence[Method]) -> dict[str, dict[str, Any]]:
    """Return the rest of what methods remember, by the name of the method."""
    values = {
        method.name: {key: value for key, value in _state(method).items() if not isinstance(value, Tensor)}
        for method in methods
    }
    return {name: state for name, state in values.items() if state}


def restore_methods(
    methods: Sequence[Method], tensors: Mapping[str, Tensor], values: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore what `method_tensors` and `method_values` returned."""
    for method in methods:
        prefix = f"methods.{method.name}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        state = {**values.get(method.name, {}), **own}
        if state:
            method.load_state(state)


def _state(method: Method) -> Mapping[str, Any]:
    state = method.state()
    allowed = (Tensor, int, float, str, bool, type(None))
    items = state.items() if isinstance(state, Mapping) else [("it", state)]
    wrong = [f"{key} is a {type(value).__name__}" for key, value in items if not isinstance(value, allowed)]
    if wrong:
        what = f'method "{method.name}": state() returned something that cannot be saved: {wrong[0]}'
        raise PluginError(what, "", "return a dict of tensors, numbers, strings, booleans and None", plugin=method.name)
    return state
