"""Facts about a run in words and rows: what ran, its result, where the time went, the environment, how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ensemblekit.analysis.report.charts import number, percent
from ensemblekit.spec.overview import spec_overview

if TYPE_CHECKING:
    from ensemblekit.runs.run import Run

Rows = list[tuple[str, str]]
"""Labels, each with a text."""
_KEY_FIGURES = {
    "accuracy": "accuracy",
    "mean_member_accuracy": "mean member",
    "nll": "negative log-likelihood",
    "ece": "calibration error (ECE)",
    "aurc": "risk over coverages (AURC)",
    "mse": "mean squared error",
    "mean_member_mse": "mean member",
    "r2": "R²",
    "diversity": "diversity",
    "disagreement": "disagreement",
}
_TIMES = {"start": "start-up", "training": "training", "evaluation": "evaluation", "checkpoints": "checkpoints"}


def sentence(run: Run) -> str:
    """Say in one sentence what ran and what its result is."""
    spec, count = run.spec, run.spec.ensemble.members
    models = ", ".join(dict.fromkeys(model.name for model in spec.member_models))
    members = f"{count} {models} member{'s' * (count != 1)}"
    methods = " + ".join(method.name for method in spec.methods) or "independent training"
    trained = f"{members} trained on {spec.data.name} with {methods}"
    epochs = len(run.history)
    if run.status != "finished":
        reason = f": {run.error}" if run.error else ""
        return f"{trained}: the run is {run.status} after {_epochs(epochs)}{reason}."
    return f"{trained} for {_epochs(epochs)} reach {_result(run.metrics)}."


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"


def _result(metrics: Mapping[str, Any]) -> str:
    """Describe the quality of the ensemble, compared with its mean member."""
    accuracy, mean = metrics.get("test_accuracy"), metrics.get("test_mean_member_accuracy")
    if accuracy is not None:
        text = f"{percent(accuracy)} test accuracy"
        if mean is None:
            return text
        points = 100 * (accuracy - mean)
        return f"{text}, {abs(points):.2f} points {'above' if points >= 0 else 'below'} the mean member"
    mse, mean = metrics.get("test_mse"), metrics.get("test_mean_member_mse")
    if mse is None:
        return f"a test loss of {number(metrics.get('test_loss', float('nan')))}"
    text = f"a mean squared error of {number(mse)} on the test data"
    return text if not mean else f"{text}, {percent(1 - mse / mean, 1)} below the mean member's"


def key_figures(run: Run) -> Rows:
    """Return the most important metrics of the test data."""
    figures = []
    for name, label in _KEY_FIGURES.items():
        value = run.metrics.get(f"test_{name}")
        if value is not None:
            figures.append((label, percent(value) if name.endswith("accuracy") else number(float(value))))
    return figures


def overview(run: Run) -> Rows:
    """Return what the spec runs, as the plan of the run shows it."""
    rows = [*spec_overview(run.spec)]
    sizes = [int(member.get("parameters") or 0) for member in run.members]
    if sum(sizes):
        rows.append(("parameters", f"{sum(sizes):,} in {len(sizes)} members"))
    if run.best_epoch is not None:
        rows.append(("best epoch", f"{run.best_epoch}, by the validation loss"))
    if run.stopped_early:
        rows.append(("stopped early", "yes"))
    return rows


def times(run: Run) -> Rows:
    """Return what the time was spent on."""
    seconds = {_TIMES.get(name, name): value for name, value in run.seconds.items() if name != "total"}
    rows = [(label, duration(value)) for label, value in seconds.items()]
    if rows:
        rows.append(("in total", duration(sum(seconds.values()))))
    if run.milliseconds_per_1000 is not None:
        rows.append(("1,000 predictions", f"{number(run.milliseconds_per_1000)} ms"))
    return rows


def duration(seconds: float) -> str:
    """Format seconds: `12.3 s`, `1:02:03`."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def environment(run: Run) -> Rows:
    """Return versions, plugins and the machine of a run."""
    left_out = {"seconds", "plugins", "data", "engines_measured"}
    rows = [(name, str(value)) for name, value in run.environment.items() if _is_plain(value) and name not in left_out]
    for plugin in run.environment.get("plugins", []):
        if isinstance(plugin, Mapping):
            text = f"{plugin.get('name')} of {plugin.get('package')} {plugin.get('version') or ''}".strip()
            rows.append((str(plugin.get("kind")), text))
    return rows


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and value != ""


def repeat_command(run: Run) -> str:
    """Return the command that trains the same spec again."""
    return shlex.join(["ensemblekit", "train", str(run.path / "spec.toml")])


def metric_rows(metrics: Mapping[str, Any]) -> Rows:
    """Return all final metrics by name."""
    return [(name, number(float(value))) for name, value in metrics.items() if isinstance(value, int | float)]
