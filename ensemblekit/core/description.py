"""Facts about a plugin for `list` and `inspect`, from its docstring, fields and hooks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.parameters import Parameter, parameters, toml_value
from ensemblekit.core.plugin import PREDICTED
from ensemblekit.core.registry import PluginInfo
from ensemblekit.core.verification import implemented_hooks


def plugin_page(info: PluginInfo) -> dict[str, Any]:
    """Return all facts about a plugin as plain values; imports it."""
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
        "snippet": snippet(KINDS[info.kind].section, fields, info.name),
        **(dataset_facts(plugin_class) if issubclass(plugin_class, Dataset) else {}),
    }


def dataset_facts(dataset_class: type[Dataset]) -> dict[str, Any]:
    """Return size, form, origin and location of a data set; None where unknown.

    Facts that depend on parameters are those of the defaults.
    """
    facts: dict[str, Any] = {
        "samples": str(dataset_class.samples) or None,
        "source": str(dataset_class.source) or None,
        "licence": str(dataset_class.licence) or None,
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
        shape = [int(size) for size in known.input_shape]
        facts |= {"task": known.task, "input_shape": shape, "num_outputs": int(known.num_outputs)}
    found = dataset.found_at()
    return facts | {"looked_for": [str(place) for place in dataset.places()], "found_at": str(found) if found else None}


def dataset_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of `list datasets`: name, description, samples, shape, outputs, presence."""
    if entry["error"]:
        return entry["name"], f"broken: {entry['error']}", "", "", "", ""
    presence = f"at {entry['found_at']}" if entry["found_at"] else "no" if entry["looked_for"] else ""
    outputs = str(entry["num_outputs"] or "")
    return entry["name"], entry["description"], entry["samples"] or "", _shape(entry), outputs, presence


def page_facts(page: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts as pairs of a label and lines of text."""
    facts = [("formula", page["formula"]), ("paper", page["paper"]), ("hooks", ", ".join(page["hooks"]))]
    facts.append(("names", ", ".join(page.get("names", []))))
    facts.append(("package", f"{page['package']} {page['version']}".strip()))
    facts += [(label, words) for label, words in page.get("paths", {}).items()]
    if page["kind"] == "dataset":
        what = {"regression": "values to predict"}.get(page["task"], PREDICTED.get(page["task"], ""))
        form = f"{page['task']}: inputs of {_shape(page)}, {page['num_outputs']} {what}"
        facts.append(("samples", page["samples"] or ""))
        facts.append(("form", form if page["input_shape"] else "known when it is loaded"))
        facts += [("source", page["source"] or ""), ("licence", page["licence"] or "")]
        if page["looked_for"]:
            facts += [("present", page["found_at"] or "no"), ("looked in", "\n".join(page["looked_for"]))]
    return facts


def _shape(facts: Mapping[str, Any]) -> str:
    return "×".join(map(str, facts["input_shape"] or ()))


def snippet(header: str, fields: Sequence[Parameter], name: str | None = None) -> str:
    """Return the TOML of a section with its defaults; parameters without a default are commented out.

    Args:
        header: the section's header, such as `[method]`; empty for keys at the top of a spec.
        fields: its parameters.
        name: the plugin that it selects, if it selects one.
    """
    lines = [] if name is None else [(f"name = {toml_value(name)}", "")]
    for field in fields:
        value = f"{field.name} = {toml_value(field.default)}" if field.default is not None else f"# {field.name} = …"
        lines.append((value, f"# {'required: ' if field.required else ''}{field.allowed}"))
    width = max(len(line) for line, _ in lines)
    texts = [f"{line:<{width}}  {note}".rstrip() for line, note in lines]
    return "\n".join([header, *texts] if header else texts)
