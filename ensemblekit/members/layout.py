"""What the outputs of a spec's networks mean, and the objective of these outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import UsageError
from ensemblekit.core.objective import Objective
from ensemblekit.core.outputs import AuxiliaryRows, OutputLayout
from ensemblekit.core.plugin import Method
from ensemblekit.spec.sections import Spec


def output_layout(spec: Spec, info: DataInfo) -> OutputLayout:
    """Return what the rows and columns of the outputs of a spec's networks mean, for data of these shapes.

    Raises:
        UsageError: models of one ensemble give different things beside their prediction.
    """
    num_outputs = spec.loss.num_outputs(info)
    extras = [(model, dict(model.extra_outputs(info.input_shape))) for model in spec.member_models]
    for model, own in extras:
        if own != extras[0][1]:
            what = f'models "{extras[0][0].name}" and "{model.name}" give different outputs beside their predictions'
            raise UsageError(f"{what}: {extras[0][1]} and {own}", "ensemble.groups", "use models that give the same")
    auxiliary = [
        AuxiliaryRows(group.name, group.members, group.outputs or spec.ensemble.members)
        for group in spec.auxiliary_groups
    ]
    return OutputLayout(num_outputs, spec.loss.slices(num_outputs), extras[0][1], tuple(auxiliary))


def run_objective(
    spec: Spec, info: DataInfo, methods: Sequence[Method], listeners: Iterable[object] | None = None
) -> Objective:
    """Return the objective of a spec.

    Args:
        spec: the spec.
        info: task and shapes of its data.
        methods: its methods, or copies of them.
        listeners: objects that follow the life cycle, with the spec's extensions; None: nobody does.
    """
    extensions = () if listeners is None else spec.extensions
    losses = [group.loss or spec.loss for group in spec.member_groups for _ in range(group.members)]
    return Objective(
        methods,
        spec.loss,
        extensions,
        listeners or (),
        output_layout(spec, info),
        spec.combiner,
        losses if any(loss.key != spec.loss.key for loss in losses) else (),
    )
