"""What a finished run tells a person: members against the ensemble, the decomposition, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from ensemblekit.core.plugin import Method

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

MOST_MEMBERS = 20
"""Of more members only the first are listed one by one."""
OF_SPREAD = ("diversity", "remainder", "disagreement", "mutual_information")


class FinishedRun(Protocol):
    """What a summary needs to know of a run."""

    @property
    def path(self) -> Path: ...
    @property
    def spec(self) -> Spec: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def members(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class RunSummary:
    """The closing summary in plain words; what is not known is empty."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A row for each member, for their mean and for the ensemble."""
    gain: str
    decomposition: str
    time: str
    path: Path
    next_steps: tuple[tuple[str, str], ...]
    """Commands, each with what it is for."""


def run_summary(run: FinishedRun) -> RunSummary:
    """What the run achieved, and what could be done with it next."""
    quality = "mse" if metric(run.metrics, "mse") is not None else "accuracy"
    return RunSummary(
        columns=("", quality, "loss", "parameters", ""),
        rows=tuple(_rows(run, quality)),
        gain=_gain(run.metrics, quality) if len(run.members) > 1 else "",
        decomposition=decomposition_line(run.metrics),
        time=time_line(run.seconds),
        path=run.path,
        next_steps=tuple(_next_steps(run)),
    )


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric of the test data; names that speak of members may or may not begin with `test_`."""
    value = metrics.get(f"test_{name}", metrics.get(name))
    return None if value is None else float(value)


def number(value: float | None) -> str:
    """Three decimals; four digits of what is very small, none behind the point of what is large."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.4g}"


def quality_text(value: float | None, quality: str) -> str:
    """An accuracy as a percentage, any other measure as a number."""
    if quality != "accuracy":
        return number(value)
    return "" if value is None else f"{100 * value:.2f} %"


def time_line(seconds: Mapping[str, float]) -> str:
    """`12.3 s of training, 0.5 s of evaluation, …`; nothing if nothing is known."""
    labels = {"training": "training", "evaluation": "evaluation", "checkpoints": "checkpoints", "start": "start-up"}
    return ", ".join(f"{seconds[name]:.1f} s of {label}" for name, label in labels.items() if name in seconds)


def decomposition_line(metrics: Mapping[str, Any]) -> str:
    """`ensemble loss 0.071 = mean member 0.098 - diversity 0.031 + remainder 0.004`, if all of it is known."""
    mean_member, diversity, remainder = (
        metric(metrics, name) for name in ("mean_member_loss", "diversity", "remainder")
    )
    if mean_member is None or diversity is None or remainder is None:
        return ""
    total = mean_member - diversity + remainder
    ensemble_loss = metric(metrics, "loss")
    # eq. 3 speaks of the mean output; a method may combine by something else
    is_mean = ensemble_loss is not None and abs(total - ensemble_loss) <= 1e-3 * max(abs(total), 1e-3)
    name = "ensemble loss" if is_mean else "loss of the mean output"
    sign = "-" if remainder < 0 else "+"
    return (
        f"{name} {number(total)} = mean member {number(mean_member)} - diversity {number(diversity)}"
        f" {sign} remainder {number(abs(remainder))}"
    )


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of (whose, metric, value): first the ensemble's, then its members', then how they differ."""
    groups: dict[str, list[tuple[str, str, str]]] = {"ensemble": [], "members": [], "spread": []}
    for name, value in metrics.items():
        plain = name.removeprefix("test_")
        of_members = "member" in plain or plain.startswith("oracle")
        group = "members" if of_members else "spread" if plain in OF_SPREAD else "ensemble"
        measure = "accuracy" if plain.endswith("accuracy") else plain
        shown = quality_text(value, measure) if isinstance(value, float) else str(value)
        groups[group].append((group, name, shown))
    return [row for rows in groups.values() for row in rows]


def _rows(run: FinishedRun, quality: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for member in run.members[:MOST_MEMBERS]:
        state = "frozen" if member.get("frozen") else ""
        cells = (quality_text(member.get(quality), quality), number(member.get("loss")))
        rows.append((_label(member), *cells, f"{member['parameters']:,}", state))
    left_out = len(run.members) - MOST_MEMBERS
    if left_out > 0:
        rows.append((f"and {left_out} more", "", "", "", ""))
    if len(run.members) > 1:
        mean = quality_text(metric(run.metrics, f"mean_member_{quality}"), quality)
        rows.append(("mean member", mean, number(metric(run.metrics, "mean_member_loss")), "", ""))
    # those of a network count once, however many passes it makes
    parameters = sum(member["parameters"] for member in run.members if not member.get("pass"))
    ensemble = quality_text(metric(run.metrics, quality), quality)
    rows.append(("ensemble", ensemble, number(metric(run.metrics, "loss")), f"{parameters:,}", ""))
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
        return f"level with {whose}"
    return f"{size} {unit} {'behind' if ahead < 0 else 'ahead of'} {whose}"


def _next_steps(run: FinishedRun) -> list[tuple[str, str]]:
    place = shlex.quote(str(run.path))
    steps = [
        (f"ensemblekit evaluate {place}", "every metric of the test data"),
        (f"ensemblekit predict {place} FILES…", "classes or values of new data, with how sure the ensemble is"),
    ]
    setting = _other_setting(run.spec)
    if setting:
        spec_file = shlex.quote(str(run.path / "spec.toml"))
        steps.append((f"ensemblekit train {spec_file} --set {setting}", "the same run, a little different"))
    return steps


def _other_setting(spec: Spec) -> str:
    """One override that is worth a try: another value of a parameter that the spec sets, or else more members."""
    for index, method in enumerate(spec.methods):
        path = "method" if len(spec.methods) == 1 else f"method.{index}"
        for field in type(method).model_fields:
            value = getattr(method, field)
            if field not in method.model_fields_set or not isinstance(value, float):
                continue
            for other in ((1 + value) / 2, value / 2):
                key = type(method).model_fields[field].alias or field
                if round(other, 4) != value and _is_allowed(method, key, round(other, 4)):
                    return f"{path}.{key}={round(other, 4):g}"
    if spec.groups or any(method.required_members() is not None for method in spec.methods):
        return ""
    return f"ensemble.members={2 * spec.ensemble.members}"


def _is_allowed(method: Method, key: str, value: float) -> bool:
    table = {**method.to_table(), key: value}
    table.pop("name")
    try:
        type(method).from_table(table)
    except ValidationError:
        return False
    return True
