"""What `inspect` shows of a plugin, from its docstring, fields and hooks, and what `validate` shows of a spec."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ensemblekit.core.hooks import implemented_hooks
from ensemblekit.core.parameters import Parameter, parameters, toml_value
from ensemblekit.core.plugin import Dataset, Section
from ensemblekit.core.registry import PluginInfo

if TYPE_CHECKING:
    from ensemblekit.spec.sections import Spec

_HEADERS = {
    "method": "[method]",
    "model": "[model]",
    "dataset": "[data]",
    "loss": "[training.loss]",
    "extension": "[[extensions]]",
}


def plugin_page(info: PluginInfo) -> dict[str, Any]:
    """Everything there is to know of a plugin, as plain values; imports it."""
    plugin_class = info.load()
    description, _, details = (inspect.getdoc(plugin_class) or "").partition("\n")
    fields = parameters(plugin_class)
    return {
        "name": info.name,
        "kind": info.kind,
        "description": description.strip(),
        "details": " ".join(details.split()),
        "formula": plugin_class.formula,
        "paper": plugin_class.paper,
        "parameters": [vars(field) for field in fields],
        "hooks": sorted(implemented_hooks(plugin_class)),
        "package": info.package,
        "version": info.version,
        "snippet": snippet(info, fields),
        **(dataset_facts(plugin_class) if issubclass(plugin_class, Dataset) else {}),
    }


def dataset_facts(dataset_class: type[Dataset]) -> dict[str, Any]:
    """Size, form and origin of a data set, where it was looked for and where it is; None where it is not known.

    As far as it depends on parameters, it is said for their defaults.
    """
    facts: dict[str, Any] = {
        "samples": dataset_class.samples or None,
        "source": dataset_class.source or None,
        "licence": dataset_class.licence or None,
        "task": None,
        "input_shape": None,
        "num_outputs": None,
        "looked_for": [],
        "found_at": None,
    }
    try:
        dataset = dataset_class()
    except ValidationError:  # it has a required parameter, such as a path
        return facts
    known = dataset.info
    if known:
        facts |= {"task": known.task, "input_shape": list(known.input_shape), "num_outputs": known.num_outputs}
    found = dataset.found_at()
    return facts | {"looked_for": [str(place) for place in dataset.places()], "found_at": str(found) if found else None}


def dataset_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of `list datasets`: name, description, samples, shape, outputs, presence."""
    if entry["error"]:
        return entry["name"], f"broken: {entry['error']}", "", "", "", ""
    presence = f"at {entry['found_at']}" if entry["found_at"] else "no" if entry["looked_for"] else ""
    outputs = str(entry["num_outputs"] or "")
    return entry["name"], entry["description"], entry["samples"] or "", _shape(entry), outputs, presence


def page_facts(page: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The page's facts as pairs of a label and lines of text; what is empty prints nothing."""
    facts = [("formula", page["formula"]), ("paper", page["paper"]), ("hooks", ", ".join(page["hooks"]))]
    facts.append(("package", f"{page['package']} {page['version']}".strip()))
    facts += [(label, words) for label, words in page.get("paths", {}).items()]
    if page["kind"] == "dataset":
        what = "classes" if page["task"] == "classification" else "values to predict"
        form = f"{page['task']}: inputs of {_shape(page)}, {page['num_outputs']} {what}"
        facts.append(("samples", page["samples"] or ""))
        facts.append(("form", form if page["input_shape"] else "known when it is loaded"))
        facts += [("source", page["source"] or ""), ("licence", page["licence"] or "")]
        if page["looked_for"]:
            facts += [("present", page["found_at"] or "no"), ("looked in", "\n".join(page["looked_for"]))]
    return facts


def _shape(facts: Mapping[str, Any]) -> str:
    return "×".join(map(str, facts["input_shape"] or ()))


def snippet(info: PluginInfo, fields: Sequence[Parameter]) -> str:
    """TOML that selects the plugin with its defaults, ready to paste; what has no default is commented out."""
    lines = [(f'name = "{info.name}"', "")]
    for field in fields:
        value = f"{field.name} = {toml_value(field.default)}" if field.default is not None else f"# {field.name} = …"
        lines.append((value, f"# {'required: ' if field.required else ''}{field.allowed}"))
    width = max(len(line) for line, _ in lines)
    return "\n".join([_HEADERS[info.kind], *(f"{line:<{width}}  {note}".rstrip() for line, note in lines)])


def spec_overview(spec: Spec) -> list[tuple[str, str]]:
    """What a spec will run, as pairs of a label and words; of long sections only what was set."""
    epochs = spec.training.epochs
    rows = [("data", _words(spec.data, only=spec.data.model_fields_set))]
    if spec.groups:
        rows += [("model", f"{group.members} × {_words(group.model)}") for group in spec.groups]
    else:
        rows.append(("model", _words(spec.model)))
    rows.append(("members", str(spec.ensemble.members)))
    for method in spec.methods:
        rows.append(("method", _words(method)))
        if len(spec.methods) == 1:
            rows.append(("  minimises", method.formula_for_parameters()))
        else:
            rows.append(("  answers", ", ".join(sorted(implemented_hooks(type(method))))))
    if not spec.methods:
        rows.append(("method", "none: members are trained independently"))
    return [
        *rows,
        ("loss", _words(spec.loss)),
        ("optimizer", _words(spec.optimizer, only={"lr", *spec.optimizer.model_fields_set})),
        ("schedule", _words(spec.schedule, only=spec.schedule.model_fields_set)),
        ("training", f"{epochs} epoch{'s' * (epochs > 1)}, batches of {spec.training.batch_size}"),
        ("engine", f"{spec.engine.name} on {spec.engine.device}"),
        ("seed", str(spec.seed)),
    ]


def _words(section: Section, only: Collection[str] | None = None) -> str:
    """A section's name and its settings; `only` names fields, the others are left out."""
    aliases = None if only is None else {type(section).model_fields[name].alias or name for name in only}
    table = section.to_table()
    name = table.pop("name")
    settings = ", ".join(f"{key} = {toml_value(table[key])}" for key in table if aliases is None or key in aliases)
    return f"{name} ({settings})" if settings else str(name)
