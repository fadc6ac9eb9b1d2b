"""The plan of a run: what will be trained on what, once data and members are known."""

from __future__ import annotations

from collections.abc import Sequence

from ensemblekit.data.loading import Data
from ensemblekit.members.state import MemberState
from ensemblekit.runs.outputs import MAX_BYTES
from ensemblekit.spec.overview import spec_overview
from ensemblekit.spec.sections import Spec

Plan = list[tuple[str, str]]
"""Rows of a label and a text."""


def make_plan(spec: Spec, data: Data, members: Sequence[MemberState], passes: int | None = None) -> Plan:
    """Describe a run: the overview of its spec, with the sizes of its data and its members.

    Args:
        spec: the spec.
        data: its data.
        members: the first members.
        passes: the number of stochastic passes of each member in a prediction; None: one deterministic pass.
    """
    plan: Plan = []
    for label, text in spec_overview(spec):
        plan.append((label, text))
        if label == "data":
            plan.append(("samples", _samples(data)))
            plan.extend(data.notes)
        if label == "members":
            plan.append(("parameters", _parameters(members)))
        if label == "optimizer" and not spec.optimizer.elementwise:
            plan.append(("  note", "not known to be element-wise: it updates every parameter by itself"))
    if spec.training.keep_outputs:
        size, out_of_fold = _outputs_size(spec, data, passes or 1), _out_of_fold_size(spec, data, passes or 1)
        limit = f"more than {MAX_BYTES // 2**20} MiB"
        if size > MAX_BYTES:
            plan.append(("outputs", f"not kept: {size / 2**20:,.0f} MiB, {limit}"))
        elif size + out_of_fold > MAX_BYTES:
            plan.append(
                ("outputs", f"out-of-fold outputs are not kept: {out_of_fold / 2**20:,.0f} MiB, in all {limit}")
            )
    return plan


def _outputs_size(spec: Spec, data: Data, passes: int) -> int:
    """The size of the members' outputs on validation and test data in bytes, in float32."""
    num_samples = len(data.test) + (0 if data.validation is None else len(data.validation))
    return 4 * passes * spec.ensemble.members * num_samples * spec.loss.num_outputs(data.info)


def _out_of_fold_size(spec: Spec, data: Data, passes: int) -> int:
    """The size of the outputs of members on training samples that they have not seen, in bytes; 0 without folds."""
    rows = 0 if spec.data.folds is None else -(-spec.ensemble.members // spec.data.folds)
    return 4 * passes * rows * len(data.train) * spec.loss.num_outputs(data.info)


def _samples(data: Data) -> str:
    validation = f", {len(data.validation):,} for validation" if data.validation is not None else ""
    return f"{len(data.train):,} for training{validation}, {len(data.test):,} for testing"


def _parameters(members: Sequence[MemberState]) -> str:
    # members of a family share their network
    sizes = [member.num_parameters // member.size for member in members if not member.auxiliary]
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    return f"{each} per member, {sum(member.num_parameters for member in members):,} in total"
