"""Members that do not learn by gradients: fitted once to the training data, or with outputs that are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError, PluginError
from ensemblekit.core.losses import Loss
from ensemblekit.core.seeds import derive_seed
from ensemblekit.data.loading import Split
from ensemblekit.members.state import MemberState
from ensemblekit.spec.sections import Spec


def fit_members(
    states: Sequence[MemberState], splits: Mapping[str, Split | None], weights: Tensor | None, spec: Spec
) -> None:
    """Fit the members whose model asks for it, each with its own sample weights and seed, unless they are fitted.

    Args:
        states: the members.
        splits: training, validation and test data by name.
        weights: sample weights (N, M of the spec), or None.
        spec: what is trained.
    """
    unfitted = [state for state in states if state.model.fitted and not state.steps]
    train = splits["train"]
    assert train is not None
    if any(state.is_here for state in unfitted):
        inputs = torch.cat([batch.inputs.cpu() for batch in train.batches(spec.training.batch_size)])
        for state in filter(lambda state: state.is_here, unfitted):
            device = next((tensor.device for tensor in state.network.buffers()), torch.device("cpu"))
            own = _own_weights(weights, train.importance, state.seed_index)
            seed = derive_seed(spec.seed, "fit", state.seed_index)
            seen = _seen_samples(train, state.seed_index, spec.data.folds)
            samples = inputs[seen], train.targets.cpu()[seen], None if own is None else own[seen]
            state.model.fit(state.network.cpu(), *samples, spec.loss, seed)
            state.network.to(device)
    for state in unfitted:
        state.steps = 1
    look_up_outputs(states, splits, spec.loss)


def _seen_samples(train: Split, member: int, num_folds: int | None) -> Tensor | slice:
    """Return which training samples a member is fitted to: all but those of the fold that it leaves out."""
    if train.folds is None or num_folds is None:
        return slice(None)
    return train.folds.cpu() != member % num_folds


def _own_weights(weights: Tensor | None, importance: Tensor | None, member: int) -> Tensor | None:
    """Return the weights of the training samples (N,) for a member: those of methods, times those of the data."""
    if weights is None:
        return None if importance is None else importance.cpu()
    own = weights[:, member].cpu()
    return own if importance is None else own * importance.cpu()


def look_up_outputs(states: Sequence[MemberState], splits: Mapping[str, Split | None], loss: Loss) -> None:
    """Look up the outputs of members that know them without computing anything."""
    for state in states:
        for name, split in splits.items():
            if split is None or name in state.known or not state.is_here:
                continue
            indices = torch.arange(len(split)) if split.indices is None else split.indices
            outputs = state.model.known_outputs(name, indices, loss)
            if outputs is not None:
                state.known[name] = _checked(outputs, state, name, len(split)).to(split.targets.device)


def _checked(outputs: Tensor, state: MemberState, split: str, num_samples: int) -> Tensor:
    """Return known outputs as (1, N, C) if there is one for each sample."""
    where = f'model "{state.model.name}", {split} data'
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != num_samples:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        what = f"known_outputs() returned {got}, expected outputs of {num_samples} samples"
        raise PluginError(what, where, "return a tensor (N, num_outputs)", plugin=state.model.name)
    if not bool(outputs.isfinite().all()):
        raise DataError("an output is not finite", where, "correct the file")
    return outputs.float().unsqueeze(0)
