"""What a finished run leaves behind: the metadata of its model, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ensemblekit.core.out_of_fold import OUT_OF_FOLD
from ensemblekit.data.loading import Data
from ensemblekit.members.state import MemberState
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.outputs import KeptOutputs, is_too_large

Row = Mapping[str, Any]


def described(
    rows: Sequence[Mapping[str, Any]], members: Sequence[MemberState], passes: int | None
) -> list[dict[str, Any]]:
    """Return the metrics of each member, or of each pass of each network, together with what it is."""
    described = []
    members = [state for state in members for _ in range(state.size)][: len(rows) // (passes or 1)]
    for index, row in enumerate(rows):
        number, network = divmod(index, len(members))
        of_pass = {"network": network, "pass": number} if (passes or 1) > 1 else {}
        state = members[network]
        described.append({**row, **of_pass, "parameters": state.num_parameters // state.size, "frozen": state.frozen})
    return described


def model_metadata(
    data: Data, networks: Sequence[MemberState], methods: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what is needed to use the model, beside its weights and the spec.

    Args:
        data: what it was trained on.
        networks: those that predict.
        methods: what the methods remember, beside tensors.
    """
    transform, scaling = data.test.transform, data.target_scaling
    return {
        "task": data.info.task,
        "input_shape": list(data.info.input_shape),
        "num_outputs": data.info.num_outputs,
        "categories": [list(block) for block in data.info.categories],
        "classes": list(data.classes) if data.classes else None,
        "members": [state.seed_index for state in networks],
        "methods": {name: dict(values) for name, values in methods.items()},
        "transform": transform.to_json() if transform is not None else None,
        "target_scaling": scaling.to_json() if scaling is not None else None,
        "preparation": data.preparation,
    }


def result(
    metrics: Mapping[str, Mapping[str, float]],
    members: Sequence[Mapping[str, Any]],
    history: Sequence[Row],
    seconds: Mapping[str, float],
    stopped_early: bool,
) -> dict[str, Any]:
    """Return the result of a run, as JSON.

    Args:
        metrics: the final metrics of each split, by its name.
        members: those of each member on the test data.
        history: the metrics of each epoch.
        seconds: what the time was spent on.
        stopped_early: whether training stopped before the last epoch of the spec.
    """
    return {
        "metrics": {**metrics.get("test", {}), **metrics.get(OUT_OF_FOLD, {})},
        "validation_metrics": metrics.get("validation", {}),
        "members": members,
        "epochs": len(history),
        "best_epoch": best_epoch(history),
        "stopped_early": stopped_early,
        "seconds": {**seconds, "total": sum(seconds.values())},
    }


def write_outputs(directory: RunDirectory, kept: Mapping[str, KeptOutputs]) -> dict[str, Any]:
    """Keep the members' outputs in a run directory unless they are too large; returns what the result says of them."""
    if is_too_large(kept):  # out-of-fold outputs are the largest part, and can be computed again
        kept = {split: outputs for split, outputs in kept.items() if split != OUT_OF_FOLD}
    return {} if not kept or is_too_large(kept) else directory.write_outputs(kept)


def best_epoch(history: Sequence[Row]) -> int | None:
    """Return the first epoch with the lowest validation loss; None if there is no such loss."""
    losses = {row["epoch"]: row.get("validation_loss") for row in history}
    known = {epoch: loss for epoch, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(known, key=known.__getitem__, default=None)


def stopped_early_text(epoch: int, patience: int) -> str:
    """Say that training has stopped before its last epoch."""
    evaluations = "evaluation" if patience == 1 else f"{patience} evaluations"
    return f"stopped early after epoch {epoch}: no lower validation loss in the last {evaluations}"


def kept_best_text(epoch: int, loss: float | None) -> str:
    """Say that the weights are not those of the last epoch."""
    of_loss = "" if loss is None else f", {loss:.4g}"
    return f"the weights are those of epoch {epoch}, which has the lowest validation loss{of_loss}"
