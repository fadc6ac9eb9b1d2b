"""The closing summary of a run: members compared with the ensemble, the decomposition, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ensemblekit.core.metrics import METRIC_GROUPS, metric_group
from ensemblekit.core.plugin import Method
from ensemblekit.display.numbers import number, quality_text

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

MAX_LISTED_MEMBERS = 20
"""Members beyond this number are not listed one by one."""


@dataclass(frozen=True)
class RunSummary:
    """The closing summary as text; unknown parts are empty."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A row for each member, for their mean and for the ensemble."""
    gain: str
    decomposition: str
    out_of_fold: str
    time: str
    path: Path
    next_steps: tuple[tuple[str, str], ...]
    """Commands, each with its purpose."""


def run_summary(
    path: Path,
    spec: Spec,
    metrics: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
) -> RunSummary:
    """Summarise a finished run.

    Args:
        path: its directory.
        spec: its spec.
        metrics: the final metrics on the test data.
        members: those of each member.
        seconds: what the time was spent on.
    """
    quality = "mse" if metric(metrics, "mse") is not None else "accuracy"
    return RunSummary(
        columns=("", quality, "loss", "parameters", ""),
        rows=tuple(_rows(metrics, members, quality)),
        gain=_gain(metrics, quality) if len(members) > 1 else "",
        decomposition=decomposition_line(metrics),
        out_of_fold=out_of_fold_line(metrics, quality),
        time=time_line(seconds),
        path=path,
        next_steps=tuple(_next_steps(path, spec)),
    )


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of the test data; the names may or may not begin with `test_`."""
    value = metrics.get(f"test_{name}", metrics.get(name))
    return None if value is None else float(value)


def time_line(seconds: Mapping[str, float]) -> str:
    """Describe what the time was spent on: `12.3 s of training, 0.5 s of evaluation, …`."""
    labels = {"training": "training", "evaluation": "evaluation", "checkpoints": "checkpoints", "start": "start-up"}
    return ", ".join(f"{seconds[name]:.1f} s of {label}" for name, label in labels.items() if name in seconds)


def decomposition_line(metrics: Mapping[str, Any]) -> str:
    """Write the decomposition: `ensemble loss 0.071 = mean member 0.098 - diversity 0.031 + remainder 0.004`.

    The remainder has the sign of the metric: `+ remainder -0.004`.
    """
    mean_member, diversity, remainder = (
        metric(metrics, name) for name in ("mean_member_loss", "diversity", "remainder")
    )
    if mean_member is None or diversity is None or remainder is None:
        return ""
    total = mean_member - diversity + remainder
    ensemble_loss = metric(metrics, "loss")
    # eq. 3 is about the mean output; a method may combine the outputs in another way
    is_mean = ensemble_loss is not None and abs(total - ensemble_loss) <= 1e-3 * max(abs(total), 1e-3)
    name = "ensemble loss" if is_mean else "loss of the mean output"
    return (
        f"{name} {number(total)} = mean member {number(mean_member)} - diversity {number(diversity)}"
        f" + remainder {number(remainder)}"
    )


def out_of_fold_line(metrics: Mapping[str, Any], quality: str) -> str:
    """Write the quality of out-of-fold predictions: `out of fold: accuracy 95.10 %, loss 0.171 …`; empty without."""
    values = {name: metrics.get(f"out_of_fold_{name}") for name in (quality, "loss")}
    shown = ", ".join(f"{name} {quality_text(value, name)}" for name, value in values.items() if value is not None)
    return f"out of fold: {shown} (training samples, each predicted by members that have not seen it)" if shown else ""


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of (group, metric, value): the ensemble, its members, how they differ, out-of-fold predictions."""
    groups: dict[str, list[tuple[str, str, str]]] = {group: [] for group in (*METRIC_GROUPS, "out of fold")}
    for name, value in metrics.items():
        plain = name.removeprefix("test_").removeprefix("out_of_fold_")
        group = "out of fold" if name.startswith("out_of_fold_") else metric_group(plain)
        measure = "accuracy" if plain.endswith("accuracy") else plain
        shown = quality_text(value, measure) if isinstance(value, float) else str(value)
        groups[group].append((group, name, shown))
    return [row for rows in groups.values() for row in rows]


def _rows(metrics: Mapping[str, Any], members: Sequence[Mapping[str, Any]], quality: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for member in members[:MAX_LISTED_MEMBERS]:
        state = "frozen" if member.get("frozen") else ""
        cells = (quality_text(member.get(quality), quality), number(member.get("loss")))
        rows.append((_label(member), *cells, f"{member['parameters']:,}", state))
    hidden = len(members) - MAX_LISTED_MEMBERS
    if hidden > 0:
        rows.append((f"and {hidden} more", "", "", "", ""))
    if len(members) > 1:
        mean = quality_text(metric(metrics, f"mean_member_{quality}"), quality)
        rows.append(("mean member", mean, number(metric(metrics, "mean_member_loss")), "", ""))
    # the parameters of a network count once, whatever the number of its stochastic passes
    parameters = sum(member["parameters"] for member in members if not member.get("pass"))
    ensemble = quality_text(metric(metrics, quality), quality)
    rows.append(("ensemble", ensemble, number(metric(metrics, "loss")), f"{parameters:,}", ""))
    return rows


def _label(member: Mapping[str, Any]) -> str:
    return f"network {member['network']} pass {member['pass']}" if "pass" in member else f"member {member['index']}"


def _gain(metrics: Mapping[str, Any], quality: str) -> str:
    own = metric(metrics, quality)
    others = [(whose, metric(metrics, f"{whose}_member_{quality}")) for whose in ("best", "mean")]
    known = [(whose, value) for whose, value in others if value is not None]
    if own is None or not known:
        return ""
    compared = [_compared(own, value, quality, f"its {whose} member") for whose, value in known]
    return f"the ensemble is {' and '.join(compared)}"


def _compared(own: float, other: float, quality: str, whose: str) -> str:
    if quality == "accuracy":
        ahead, unit = 100 * (own - other), "points"
    else:
        ahead, unit = 100 * (1 - own / other) if other else 0.0, "% of squared error"
    size = f"{abs(ahead):.2f}"
    if float(size) == 0:
        return f"on par with {whose}"
    return f"{size} {unit} {'behind' if ahead < 0 else 'ahead of'} {whose}"


def _next_steps(path: Path, spec: Spec) -> list[tuple[str, str]]:
    run = shlex.quote(str(path))
    steps = [
        (f"ensemblekit evaluate {run}", "all metrics on the test data"),
        (f"ensemblekit predict {run} FILES…", "predictions with uncertainty for new data"),
    ]
    if override := _suggested_override(spec):
        spec_file = shlex.quote(str(path / "spec.toml"))
        steps.append((f"ensemblekit train {spec_file} --set {override}", f"the same run with {_change(override)}"))
    return steps


def _change(override: str) -> str:
    """Say in words what an override of `_suggested_override` changes."""
    path, _, value = override.partition("=")
    key = path.rpartition(".")[2]
    return "more members" if path == "ensemble.members" else f"{key} {value}"


def _suggested_override(spec: Spec) -> str:
    """Suggest one override that is worth trying: another value of a method's parameter, or else more members."""
    for index, method in enumerate(spec.methods):
        path = "method" if len(spec.methods) == 1 else f"method.{index}"
        for field, info in type(method).model_fields.items():
            value, key = getattr(method, field), info.alias or field
            if field in method.model_fields_set and isinstance(value, float):
                for other in (round((1 + value) / 2, 4), round(value / 2, 4)):
                    if other != value and _is_allowed(method, key, other):
                        return f"{path}.{key}={other:g}"
    if spec.has_groups or any(method.required_members() is not None for method in spec.methods):
        return ""
    return f"ensemble.members={2 * spec.ensemble.members}"


def _is_allowed(method: Method, key: str, value: float) -> bool:
    inner = {path.partition(".")[0] for path, _ in method.inner_plugins()}
    fields = {info.alias or name: name for name, info in type(method).model_fields.items()}
    table = {**method.to_table(), **{key: getattr(method, fields[key]) for key in inner}, key: value}
    table.pop("name")
    try:
        type(method).from_table(table)
    except ValidationError:
        return False
    return True
