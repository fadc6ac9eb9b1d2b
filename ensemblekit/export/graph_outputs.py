"""The outputs of an exported graph, by name: what `predict` says about a sample, as tensors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ensemblekit.core.label_metrics import binary_entropy
from ensemblekit.core.metrics import uncertainty
from ensemblekit.core.plugin import Task
from ensemblekit.inference.combining import Combiner

Outputs = dict[str, Tensor]
DESCRIPTIONS = {
    "probabilities": "probabilities of the classes or labels, combined and calibrated as the run does",
    "prediction": "point predictions, in the original units",
    "member_outputs": "raw outputs of each member, before they are combined",
    "entropy": "entropy of the members' mean probabilities, in nats",
    "mutual_information": "the part of the entropy that is due to disagreement of the members, in nats",
    "standard_deviation": "of the prediction, in the original units",
    "member_deviation": "standard deviation of the members' point predictions",
    "low": "lower end of the prediction interval",
    "high": "upper end of the prediction interval",
}
"""What each output is; others are those of the loss, such as quantiles."""


def graph_outputs(combiner: Combiner, task: Task, outputs: Tensor, passes: int) -> Outputs:
    """Turn the outputs of all networks (S · R, B, W), as they learnt them, into the named outputs of a graph."""
    combined = combiner.restored(combiner.combine_networks(outputs, passes))
    members = combiner.restored(combiner.objective.predictions(outputs, passes))
    return _BY_TASK[task](combiner, members, combined)


def _classes(combiner: Combiner, members: Tensor, combined: Tensor) -> Outputs:
    uncertain = uncertainty(combiner.loss.probabilities(members).double().unbind())
    return {
        "probabilities": combiner.loss.probabilities(combined),
        "member_outputs": members,
        "entropy": uncertain.entropy.to(members.dtype),
        "mutual_information": uncertain.mutual_information.to(members.dtype),
    }


def _labels(combiner: Combiner, members: Tensor, combined: Tensor) -> Outputs:
    own = combiner.loss.probabilities(members).double()
    entropy, aleatoric = binary_entropy(own.mean(dim=0)), binary_entropy(own).mean(dim=0)
    return {
        "probabilities": combiner.loss.probabilities(combined),
        "member_outputs": members,
        "entropy": entropy.to(members.dtype),
        "mutual_information": (entropy - aleatoric).clamp_min(0).to(members.dtype),
    }


def _values(combiner: Combiner, members: Tensor, combined: Tensor) -> Outputs:
    loss = combiner.loss
    prediction, deviation = loss.point(combined), loss.point(members).std(dim=0, correction=0)
    known = dict(loss.intervals(combined))
    outputs = {"prediction": prediction, "member_outputs": members, "standard_deviation": deviation}
    if "standard_deviation" in known:
        outputs["member_deviation"] = deviation
    outputs |= known
    if combiner.conformal is not None:
        half = combiner.conformal.half_widths(deviation)
        outputs |= {"low": prediction - half, "high": prediction + half}
    return outputs


_BY_TASK: dict[Task, Callable[[Combiner, Tensor, Tensor], Outputs]] = {
    "classification": _classes,
    "multilabel": _labels,
    "regression": _values,
}
