"""Out-of-fold predictions: each training sample is predicted by the members that were trained without its fold.

Member i is trained without fold i mod K. The outputs of the members that have not seen a sample are stored in rows:
row r of a sample in fold k has those of the (r + 1)-th member that was trained without fold k. If the number of members
is not a multiple of K, some folds have one member less; their last row is empty, and its member is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import Metric, evaluate, metric_group

OUT_OF_FOLD = "out_of_fold"
"""The name of these predictions, among the names of splits."""
NO_MEMBER = -1


def fold_weights(folds: Tensor, members: Tensor, num_folds: int, partner: Tensor | None = None) -> Tensor:
    """Return the weights (B, M) of a batch that leave out the samples of each member's own fold.

    A member's weights of the samples that it sees are all B / (number of these), so that the mean over the batch is the
    mean over the samples that it sees: its step is that of a network trained alone without its fold.

    Args:
        folds: the fold of each sample of the batch (B,).
        members: the indices of the members in the spec (M,).
        num_folds: the number of folds.
        partner: if samples are mixed, the index in the batch of the one that each is mixed with (B,). A mixture is left
            out if either sample is of the member's fold.
    """
    seen = folds.unsqueeze(1) != members % num_folds
    if partner is not None:
        seen = seen & seen[partner]
    return seen * (len(folds) / seen.sum(dim=0).clamp_min(1))


def held_out_members(members: Tensor, folds: Tensor, num_folds: int) -> tuple[Tensor, Tensor]:
    """Return for each sample the members that were trained without its fold, -1 in rows that are empty.

    Args:
        members: the indices of the members in the spec (M,), in the order of their outputs.
        folds: the fold of each sample (N,).
        num_folds: the number of folds.

    Returns:
        The positions of the members in this order (rows, N), and their indices in the spec (rows, N).
    """
    by_fold = [(members % num_folds == fold).nonzero().flatten() for fold in range(num_folds)]
    table = torch.nn.utils.rnn.pad_sequence(by_fold, batch_first=True, padding_value=NO_MEMBER)
    positions = table[folds].T.contiguous()
    return positions, torch.where(positions == NO_MEMBER, NO_MEMBER, members[positions.clamp_min(0)])


def held_out_outputs(outputs: Tensor, positions: Tensor, passes: int = 1) -> Tensor:
    """Pick the outputs of members that have not seen a sample; empty rows are 0.

    Args:
        outputs: those of all members (S · M, B, W) in S stochastic passes.
        positions: the members of each sample by their positions (rows, B), or -1.
        passes: the number S.

    Returns:
        (S · rows, B, W).
    """
    by_pass = outputs.unflatten(0, (passes, -1))
    picked = by_pass[:, positions.clamp_min(0), torch.arange(positions.shape[1], device=positions.device)]
    return torch.where((positions == NO_MEMBER).unsqueeze(-1), 0, picked).flatten(0, 1)


def combine_held_out(
    outputs: Tensor, members: Tensor, combine: Callable[[Tensor, Tensor], Tensor], passes: int = 1
) -> Tensor:
    """Combine the outputs of the members that have not seen a sample to out-of-fold predictions (N, C).

    Args:
        outputs: (S · rows, N, W) of S stochastic passes.
        members: the indices in the spec of the members of each sample (rows, N), or -1.
        combine: combines the outputs (S · M, B, W) of M members with these indices (M,) to (B, C).
        passes: the number S.
    """
    sets, set_of = members.unique(dim=1, return_inverse=True)
    by_pass = outputs.unflatten(0, (passes, -1))
    parts, order = [], []
    for number, chosen in enumerate(sets.T):
        rows, samples = (chosen != NO_MEMBER).nonzero().flatten(), (set_of == number).nonzero().flatten()
        parts.append(combine(by_pass[:, rows][:, :, samples].flatten(0, 1), chosen[rows]))
        order.append(samples)
    return torch.cat(parts)[torch.cat(order).argsort()]


def out_of_fold_metrics(
    outputs: Tensor,
    combined: Tensor,
    members: Tensor,
    targets: Tensor,
    loss: Loss,
    restore: Callable[[Tensor], Tensor] | None = None,
    extra: Sequence[Metric] = (),
) -> dict[str, float]:
    """Compute all metrics of out-of-fold predictions, by names without a prefix.

    Those of the ensemble are of the combined predictions. Those of members are of the rows: each is the prediction of
    all samples in one round of cross-validation. A row that some samples lack is left out of these, and
    they are left out where there is only one row.

    Args:
        outputs: the members' outputs (S · rows, N, C).
        combined: what they combine to (N, C).
        members: the members of each sample (rows, N), or -1.
        targets: as for `evaluate`, like the rest.
        loss: defines what outputs mean.
        restore: converts standardised values to the original units.
        extra: metrics beside the built-in ones.
    """
    complete = (members != NO_MEMBER).all(dim=1)
    rows = outputs.unflatten(0, (-1, len(members)))[:, complete].flatten(0, 1)
    metrics = evaluate(rows, targets, loss, combined, restore, extra)
    if len(rows) > 1:
        return metrics
    return {name: value for name, value in metrics.items() if metric_group(name) == "ensemble"}
