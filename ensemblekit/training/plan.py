"""The plan of a run: what will be trained on what, once data and members are known."""

from __future__ import annotations

from collections.abc import Sequence

from ensemblekit.data.loading import Data
from ensemblekit.members.state import MemberState
from ensemblekit.spec.overview import spec_overview
from ensemblekit.spec.sections import Spec

Plan = list[tuple[str, str]]
"""Rows of a label and a text."""


def make_plan(spec: Spec, data: Data, members: Sequence[MemberState]) -> Plan:
    """Describe a run: the overview of its spec, with the sizes of its data and its members."""
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
    return plan


def _samples(data: Data) -> str:
    validation = f", {len(data.validation):,} for validation" if data.validation is not None else ""
    return f"{len(data.train):,} for training{validation}, {len(data.test):,} for testing"


def _parameters(members: Sequence[MemberState]) -> str:
    sizes = [member.num_parameters for member in members]
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    return f"{each} per member, {sum(sizes):,} in total"
