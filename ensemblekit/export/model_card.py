"""The model card of a run: what the model is, how good it is and for what, in Markdown with front matter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ensemblekit.analysis.bootstrap import Interval
from ensemblekit.analysis.report import facts
from ensemblekit.analysis.report.charts import number, percent
from ensemblekit.core.plugin import PREDICTED
from ensemblekit.export.card_figures import CardFigures, card_figures
from ensemblekit.export.front_matter import NOT_PUBLISHED, front_matter, is_published
from ensemblekit.export.markdown import code_block, inline, yaml
from ensemblekit.inference.kept_calibration import KeptCalibration
from ensemblekit.members.python_model import NAME as PYTHON_MODEL
from ensemblekit.runs.run import Run

MOST_NAMES = 100
"""So many classes are listed by name."""
_IN_THE_SPEC = ("data", "model", "loss", "optimizer", "schedule")
FEW_SAMPLES = 1000
"""Fewer test samples than this are named as a limitation."""


def model_card(
    run: Run,
    model: Mapping[str, Any],
    kept: KeptCalibration,
    spec_toml: str,
    names: Mapping[str, str],
    licence: str | None = None,
    data: Any = None,
) -> str:
    """Return the model card of a finished run.

    Args:
        run: the run.
        model: the run's model metadata.
        kept: the run's calibration, and prediction sets or intervals.
        spec_toml: the spec to show.
        names: what to show in place of paths of this machine.
        licence: the licence of the model, if there is one.
        data: the data that was passed in Python, if the run has kept no outputs.
    """
    figures = card_figures(run, model, data)
    name = run.path.resolve().name
    is_image, columns = model["transform"] is not None, _columns(run, model)
    values = {
        "name": name,
        "front_matter": Markup(yaml(front_matter(name, run, model, figures.metrics, licence))),
        "sentence": facts.sentence(run),
        "packages": packages(run),
        "usage": code_block(usage(run, model), "python"),
        "is_python_model": _is_python_model(run),
        "plugin_files": plugin_files(run),
        "files": Markup("new/*.png") if is_image else "new.csv",
        "task": model["task"],
        "inputs": _inputs(model, columns),
        "columns": columns,
        "predicts": _predicts(model),
        "data_rows": _data_rows(run),
        "figures": figures,
        "metric_rows": _metric_rows(figures),
        "decomposition": Markup(" | ".join(number(value) for value in (figures.decomposition or {}).values())),
        "loss": run.spec.loss.name,
        "combination": _combination(run),
        "calibration": _calibration(model, kept),
        "intended_use": _intended_use(run, model),
        "limitations": _limitations(run, model, figures, kept),
        "training_rows": _training_rows(run, names),
        "spec": code_block(spec_toml, "toml"),
        "environment_rows": facts.environment(run),
        "licence": "Not stated." if licence is None else f"{licence}.",
    }
    return _template().render(values)


def packages(run: Run) -> list[str]:
    """Return the packages that it takes to load the ensemble of a run."""
    used = [str(plugin["package"]) for plugin in run.environment.get("plugins", []) if plugin.get("version")]
    return list(dict.fromkeys(["ensemblekit", *used]))


def plugin_files(run: Run) -> list[str]:
    """Return the Python files whose plugins it takes to load the ensemble of a run: those of no package."""
    used = [str(plugin["package"]) for plugin in run.environment.get("plugins", []) if not plugin.get("version")]
    return [package for package in dict.fromkeys(used) if package.endswith(".py")]


def usage(run: Run, model: Mapping[str, Any], folder: str = ".") -> str:
    """Return a few lines of Python that load a model folder and predict."""
    path = json.dumps(folder, ensure_ascii=False)
    more = ", model=MyNetwork" if _is_python_model(run) else ""
    more += f", plugins={json.dumps(plugin_files(run))}" if plugin_files(run) else ""
    transform = model["transform"]
    shape = ", ".join(map(str, (1, *(transform["stored_shape"] if transform else model["input_shape"]))))
    zeros = f"torch.zeros({shape}, dtype=torch.uint8)  # images, 0 to 255" if transform else f"torch.zeros({shape})"
    lines = ["import torch", "import ensemblekit as ek", "", f"ensemble = ek.load({path}{more})", f"inputs = {zeros}"]
    if model["task"] == "regression":
        lines.append("values = ensemble.predict(inputs)")
        lines.append("spread = ensemble.member_outputs(inputs).std(dim=0)  # how much the members differ")
    else:
        lines.append("probabilities = ensemble.predict_proba(inputs)")
        lines.append(f"{PREDICTED[model['task']]} = ensemble.predict(inputs)")
    return "\n".join(lines)


def _is_python_model(run: Run) -> bool:
    return any(model.name == PYTHON_MODEL for model in run.spec.member_models)


def _inputs(model: Mapping[str, Any], columns: Sequence[str]) -> str:
    shape = "×".join(map(str, model["input_shape"]))
    transform = model["transform"]
    if columns:
        return f"rows of a table, which ensemblekit predict turns into {shape} numbers"
    if transform is None:
        return f"{shape} numbers" if len(model["input_shape"]) == 1 else f"arrays of {shape} numbers"
    stored = "×".join(map(str, transform["stored_shape"]))
    cropped = "" if stored == shape else f", cropped to {shape}"
    return f"images of {stored} (channels × height × width), bytes, scaled and normalised as in training{cropped}"


def _columns(run: Run, model: Mapping[str, Any]) -> list[str]:
    """Return the columns of a table that the model reads; empty if its inputs have no names."""
    described = run.spec.data.describe_inputs(torch.zeros(1, *model["input_shape"]), model.get("preparation"))
    return list(described[0]) if described else []


def _predicts(model: Mapping[str, Any]) -> str:
    predicted, count, names = PREDICTED[model["task"]], model["num_outputs"], model.get("classes")
    if not names:
        return f"{count} {predicted if count != 1 else predicted.rstrip('s')}"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{len(names)} {predicted}: {', '.join(names[:MOST_NAMES])}{more}"


def _data_rows(run: Run) -> facts.Rows:
    dataset, splits = run.spec.data, run.environment.get("data", {})
    counts = [f"{int(splits[name]['samples']):,} {name}" for name in ("train", "validation", "test") if name in splits]
    rows = [
        ("data set", dataset.name if is_published(dataset) else NOT_PUBLISHED),
        ("source", dataset.source if is_published(dataset) else "not stated"),
        ("licence of the data", dataset.licence or "not known"),
        ("samples", ", ".join(counts)),
    ]
    return [(label, text) for label, text in rows if text]


def _training_rows(run: Run, names: Mapping[str, str]) -> facts.Rows:
    """Return what the spec, which the card has as well, does not say at a glance."""
    rows = [(label.strip(), _shortened(text, names)) for label, text in facts.overview(run)]
    times = [(label.replace("in total", "time in total"), text) for label, text in facts.times(run)[-2:]]
    return [row for row in rows if row[0] not in _IN_THE_SPEC] + times


def _shortened(text: str, names: Mapping[str, str]) -> str:
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def _metric_rows(figures: CardFigures) -> list[tuple[str, str, str]]:
    rows = []
    for label, value, interval, is_share in figures.rows:
        show = percent if is_share else number
        rows.append((label, show(value), "–" if interval is None else _range(interval, is_share)))
    return rows


def _range(interval: Interval, is_share: bool) -> str:
    show = percent if is_share else number
    return f"{show(interval.low)} to {show(interval.high)}"


def _combination(run: Run) -> str:
    """Say how the model differs from the plain mean of its members' outputs; empty if it does not."""
    combiner = run.combiner()
    parts = [] if combiner.name == "mean" else [f"combined by {combiner.name}"]
    parts += ["calibrated"] if combiner.calibration is not None else []
    return " and ".join(parts)


def _calibration(model: Mapping[str, Any], kept: KeptCalibration) -> str:
    parts = []
    if kept.calibration is not None:
        before, after = kept.facts.get("before", {}), kept.facts.get("after", {})
        scores = [
            f"{name.upper()} {number(before[name])} before, {number(after[name])} after"
            for name in ("nll", "ece")
            if name in before and name in after
        ]
        fitted = f"fitted to {kept.facts['num_samples']:,} validation samples" if "num_samples" in kept.facts else ""
        details = "; ".join(filter(None, [fitted, *scores]))
        parts.append(f"Calibrated after training: {kept.calibration.description} ({details}, by cross-fitting).")
    elif model["task"] != "regression":
        parts.append("Not calibrated after training: the probabilities are those that the loss led to.")
    if kept.conformal is not None:
        what = kept.conformal.description[0].upper() + kept.conformal.description[1:]
        text = f"{what}, fitted to {kept.conformal.num_samples:,} validation samples: on new data from the same"
        parts.append(
            f"{text} distribution they hold the truth with a probability of at least {1 - kept.conformal.error:g}."
        )
    elif model["task"] == "regression":
        parts.append("There are no prediction intervals: the spread of the members is not calibrated.")
    return " ".join(parts)


def _intended_use(run: Run, model: Mapping[str, Any]) -> str:
    kind = {"classification": "one of the classes above", "multilabel": "which of the labels above apply"}
    predicted = kind.get(model["task"], "the values above")
    dataset = run.spec.data
    data = f"the data set {dataset.name}" if is_published(dataset) else "the data that it was trained on"
    inputs = f"inputs that were collected and prepared like those of {data}"
    return f"As far as the run knows: to predict {predicted} for {inputs}."


def _limitations(run: Run, model: Mapping[str, Any], figures: CardFigures, kept: KeptCalibration) -> list[str]:
    found = ["Tested on held-out samples of one source only; how it does on data from elsewhere was not measured."]
    if figures.num_samples is not None and figures.num_samples < FEW_SAMPLES:
        found.append(f"{figures.num_samples:,} test samples are few: mind the widths of the intervals.")
    if model["task"] == "classification":
        found.append("It always predicts one of its classes, also for an input that belongs to none of them.")
    if kept.calibration is None and model["task"] != "regression":
        found.append("Its probabilities were not calibrated: do not read them as frequencies without a check.")
    if not run.validation:
        found.append("There were no validation samples: nothing beside the test data says how it does on new data.")
    found.append("Whether it treats groups of people or things differently was not measured, beyond the classes above.")
    return found


@cache
def _template() -> Any:
    text = files("ensemblekit.export").joinpath("templates", "model_card.md").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=False,  # it is Markdown: `inline` escapes every text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=inline,
    )
    environment.globals.update(percent=percent, number=number)
    return environment.from_string(text)
