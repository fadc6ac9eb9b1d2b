"""The report of one run: which sections it has, each computed from the run's records and its kept outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemblekit.analysis.advice import advice
from ensemblekit.analysis.report import facts
from ensemblekit.analysis.report.calibration import (
    histogram_chart,
    reliability,
    reliability_chart,
    risk_chart,
    uncertainty_histogram,
)
from ensemblekit.analysis.report.charts import Chart
from ensemblekit.analysis.report.classes import class_chart, confusion_chart
from ensemblekit.analysis.report.curves import decomposition_chart, learning_charts
from ensemblekit.analysis.report.inputs import show_inputs
from ensemblekit.analysis.report.members import (
    MemberQuality,
    accuracy_margins,
    error_correlation,
    heat_map_chart,
    pairwise_disagreement,
    quality_chart,
)
from ensemblekit.analysis.report.page import Page, Section, advised
from ensemblekit.analysis.report.predictions import Predictions, predict
from ensemblekit.analysis.report.regression import ValuePredictions, value_charts
from ensemblekit.analysis.report.samples import class_samples, value_samples
from ensemblekit.analysis.report.sizes import size_charts, size_curves
from ensemblekit.core.errors import DataError
from ensemblekit.core.losses import Loss
from ensemblekit.core.metrics import flat_metrics
from ensemblekit.core.plugin import Task
from ensemblekit.core.selective_prediction import RiskCoverage
from ensemblekit.core.tasks import TASKS, TaskKind, task_of
from ensemblekit.runs.directory import RunDirectory

if TYPE_CHECKING:
    from ensemblekit.inference.combining import Combiner
    from ensemblekit.runs.outputs import KeptOutputs
    from ensemblekit.runs.run import Run

MOST_TARGETS = 3
"""Of regression with several targets, so many have charts."""


def run_page(run: Run, data: Any = None) -> Page:
    """Compute the report of a run; of a run that has not finished, what is known so far.

    Args:
        run: the run.
        data: the data that was passed in Python, if the run has kept no outputs.
    """
    sections = [_training_section(run)]
    notes, said = list(run.notices), []
    if run.status == "finished":
        try:
            run, added = _with_what_was_added(run, data)
            notes += added
            sections += _output_sections(run, data)
            said = advised(advice(run))
        except DataError as error:  # outputs that were not kept, and data that is not there any more
            notes.append(f"Only the recorded metrics are shown: {error.problem}.")
    return Page(
        title=run.path.resolve().name or str(run.path),
        kind="run",
        sentence=facts.sentence(run),
        figures=facts.key_figures(run),
        sections=[section for section in sections if section is not None],
        overview=facts.overview(run),
        metrics=facts.metric_rows({**run.metrics, **run.validation}),
        notices=notes,
        advice=said,
        times=facts.times(run),
        environment=facts.environment(run),
        command=facts.repeat_command(run),
        spec=run.spec.to_toml(),
        num_members=len(run.members),
    )


def _with_what_was_added(run: Run, data: Any) -> tuple[Run, list[str]]:
    """Return a run with the test metrics of its calibrated outputs and prediction sets, and what was added to it."""
    combiner = run.combiner()
    if not combiner.description:
        return run, []
    metrics = flat_metrics(combiner.metrics(run.outputs("test", data)))
    note = f"Added after training: {combiner.description}. The test metrics include it, the validation metrics do not."
    return replace(run, metrics={**run.metrics, **metrics}), [note]


def _training_section(run: Run) -> Section | None:
    charts = learning_charts(run.history, run.best_epoch)
    decomposition = decomposition_chart(run.history)
    charts += [decomposition] if decomposition else []
    return Section("training", "Training", charts) if charts else None


def _output_sections(run: Run, data: Any) -> list[Section]:
    """Compute everything that rests on the members' outputs for the test data."""
    kept, combiner = run.outputs("test", data), run.combiner()
    metadata = RunDirectory.open(run.path).read_metadata()
    combined = combiner.restored(combiner.combine_kept(kept))
    return _SECTIONS[metadata["task"]](run, kept, combiner, combined, metadata)


def _class_sections(
    run: Run, kept: KeptOutputs, combiner: Combiner, combined: Tensor, metadata: Mapping[str, Any]
) -> list[Section]:
    predictions = predict(kept.outputs, combined, kept.targets, combiner.loss, metadata.get("classes"))
    groups = class_samples(predictions, kept.index)
    groups, note = show_inputs(groups, run, metadata.get("preparation"))
    return [
        Section("members", "Members", _member_charts(predictions) + _class_sizes(kept, combiner), _size_note(combiner)),
        Section("confidence", "Confidence", _confidence_charts(predictions)),
        Section("classes", "Classes", [confusion_chart(predictions), class_chart(predictions)]),
        Section("samples", "Samples", [], note, groups),
    ]


def _member_charts(predictions: Predictions) -> list[Chart]:
    correct = predictions.member_correct
    values = tuple(correct.double().mean(dim=1).tolist())
    quality = MemberQuality(
        measure="accuracy",
        values=values,
        ensemble=float(predictions.correct.double().mean()),
        oracle=float(correct.any(dim=0).double().mean()) if len(values) > 1 else None,
        margins=accuracy_margins(values, correct.shape[1]),
    )
    if len(values) == 1:
        return [quality_chart(quality)]
    disagreement = pairwise_disagreement(predictions.votes)
    correlation = error_correlation((~correct).double())
    return [
        quality_chart(quality),
        _disagreement_chart(disagreement),
        _correlation_chart(correlation, "Correlation of two members' errors (wrong or not) over the test samples"),
    ]


def _disagreement_chart(matrix: Tensor) -> Chart:
    caption = "Share of the test samples for which two members predict different classes."
    top = max(float(matrix.max()), 1e-9)
    return heat_map_chart("disagreement", "Pairwise disagreement", caption, matrix, 0.0, top)


def _correlation_chart(matrix: Tensor, what: str) -> Chart:
    caption = f"{what}: the lower, the more an ensemble gains."
    off = matrix[~torch.eye(len(matrix), dtype=torch.bool)].nan_to_num(0)
    low, high = min(0.0, float(off.min())), max(float(off.max()), 1e-9)
    return heat_map_chart("error-correlation", "Correlation of errors", caption, matrix, low, high)


def _confidence_charts(predictions: Predictions) -> list[Chart]:
    members = list(zip(predictions.member_confidence, predictions.member_correct, strict=True))
    return [
        reliability_chart(
            reliability(predictions.confidence, predictions.correct), [reliability(*member) for member in members]
        ),
        risk_chart(
            RiskCoverage.of(predictions.confidence, ~predictions.correct),
            [RiskCoverage.of(confidence, ~correct) for confidence, correct in members],
        ),
        histogram_chart(uncertainty_histogram(predictions.entropy, predictions.correct)),
    ]


def _size_note(combiner: Combiner) -> str:
    if not combiner.needs_all_members:
        return ""
    return "The combination was fitted for all members, so that smaller ensembles are not measured."


def _networks(outputs: Tensor, combiner: Combiner) -> Tensor:
    """Return the outputs of each network (M, N, C), the means over its stochastic passes."""
    return outputs.unflatten(0, (-1, combiner.num_members)).mean(dim=0)


def _class_sizes(kept: KeptOutputs, combiner: Combiner) -> list[Chart]:
    outputs = _networks(kept.outputs, combiner)
    if len(outputs) < 2 or combiner.needs_all_members:
        return []
    loss, targets = combiner.loss, kept.targets
    task = task_of(loss, outputs, targets)

    def score(combined: Tensor) -> dict[str, float]:
        correct = task.correct(combined, targets, loss)
        accuracy = {} if correct is None else {"accuracy": float(correct.double().mean())}
        return {**accuracy, "loss": float(loss(combined, targets).mean())}

    return size_charts(size_curves(outputs, lambda part: combiner.of_size(len(part)).combine(part), score))


def _label_sections(
    run: Run, kept: KeptOutputs, combiner: Combiner, combined: Tensor, metadata: Mapping[str, Any]
) -> list[Section]:
    loss, task = combiner.loss, TASKS["multilabel"]
    correct = torch.stack([_right(task, member, kept.targets, loss) for member in kept.outputs])
    values = tuple(correct.double().mean(dim=1).tolist())
    quality = MemberQuality(
        measure="accuracy",
        values=values,
        ensemble=float(_right(task, combined, kept.targets, loss).double().mean()),
        oracle=float(correct.any(dim=0).double().mean()) if len(values) > 1 else None,
        margins=accuracy_margins(values, correct.shape[1]),
    )
    note = f"Accuracy is the share of samples whose labels are all right. {_size_note(combiner)}".strip()
    return [Section("members", "Members", [quality_chart(quality), *_class_sizes(kept, combiner)], note)]


def _right(task: TaskKind, outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    correct = task.correct(outputs, targets, loss)
    assert correct is not None
    return correct


def _regression_sections(
    run: Run, kept: KeptOutputs, combiner: Combiner, combined: Tensor, metadata: Mapping[str, Any]
) -> list[Section]:
    targets = kept.targets.reshape(len(kept.targets), -1).double()
    point = combiner.loss.point
    combined, members = point(combined).double(), point(kept.outputs).double()
    if combined.shape != targets.shape:
        return []
    networks = _networks(kept.outputs, combiner).double()
    errors = (members - targets).square().mean(dim=-1)
    values = MemberQuality(
        "mean squared error", tuple(errors.mean(dim=1).tolist()), float((combined - targets).square().mean())
    )
    charts = [quality_chart(values)]
    if len(members) > 1:
        correlation = error_correlation((members - targets).flatten(1))
        charts.append(_correlation_chart(correlation, "Correlation of two members' residuals over the test samples"))
    if len(networks) > 1 and not combiner.needs_all_members:
        charts += size_charts(
            size_curves(
                networks,
                lambda part: combiner.of_size(len(part)).combine(part),
                lambda output: {"mse": float((point(output).double() - targets).square().mean())},
            )
        )
    columns = [
        ValuePredictions(targets[:, c], combined[:, c], members[:, :, c])
        for c in range(min(targets.shape[1], MOST_TARGETS))
    ]
    names = [""] if len(columns) == 1 else [str(index) for index in range(len(columns))]
    errors_charts = [chart for column, name in zip(columns, names, strict=True) for chart in value_charts(column, name)]
    groups, note = show_inputs(value_samples(columns[0], kept.index), run, metadata.get("preparation"))
    return [
        Section("members", "Members", charts, _size_note(combiner)),
        Section("errors", "Errors", errors_charts),
        Section("samples", "Samples", [], note, groups),
    ]


_SECTIONS: dict[Task, Callable[[Run, KeptOutputs, Combiner, Tensor, Mapping[str, Any]], list[Section]]] = {
    "classification": _class_sections,
    "multilabel": _label_sections,
    "regression": _regression_sections,
}
"""The sections about predictions, by the task."""
