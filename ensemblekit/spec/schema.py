"""The JSON Schema of a whole spec, with every installed plugin in it, for completion in editors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ensemblekit.core.errors import PluginError
from ensemblekit.core.plugin import Section
from ensemblekit.core.registry import Registry
from ensemblekit.spec.optimizers import optimizer_classes, optimizer_section
from ensemblekit.spec.schedules import SCHEDULES
from ensemblekit.spec.sections import DEFAULT_LOSS, MAX_SEED, EngineSection, EnsembleSection, TrainingSection


def spec_schema(registry: Registry, on_broken: Callable[[PluginError], None]) -> dict[str, Any]:
    """The schema of a spec; a plugin that cannot be loaded is left out and reported to `on_broken`."""
    definitions: dict[str, Any] = {}

    def section(model: type[Section], prefix: str) -> dict[str, Any]:
        template = f"#/$defs/{prefix}.{{model}}"
        schema = model.model_json_schema(by_alias=True, ref_template=template)
        for name, definition in schema.pop("$defs", {}).items():
            definitions[f"{prefix}.{name}"] = definition
        return schema

    def named(choices: Iterable[tuple[str, type[Section]]], prefix: str) -> dict[str, Any]:
        tables = []
        names = []
        for name, model in choices:
            schema = section(model, f"{prefix}.{name}")
            schema["properties"] = {**schema.get("properties", {}), "name": {"const": name}}
            schema["required"] = ["name", *(key for key in schema.get("required", []) if key != "name")]
            tables.append(schema)
            names.append(name)
        return {"oneOf": [{"enum": names, "description": "the name alone"}, *tables]} if names else {"not": {}}

    def plugins(kind: str) -> dict[str, Any]:
        usable = []
        for name, info in registry.plugins(kind).items():
            try:
                usable.append((name, info.load()))
            except PluginError as error:
                on_broken(error)
        return named(usable, kind)

    method, model = plugins("method"), plugins("model")
    ensemble = section(EnsembleSection, "ensemble")
    group = {"members": ensemble["properties"]["members"], "model": {"type": "object"}}  # may be a part of a model
    ensemble["properties"]["groups"] = {"type": "array", "items": {"type": "object", "properties": group}}
    training = section(TrainingSection, "training")
    training["properties"] |= {
        "loss": {**plugins("loss"), "default": DEFAULT_LOSS},
        "optimizer": named(((name, optimizer_section(name)) for name in optimizer_classes()), "optimizer"),
        "schedule": named(SCHEDULES.items(), "schedule"),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ensemblekit run spec",
        "type": "object",
        "additionalProperties": False,
        "required": ["data", "model"],
        "properties": {
            "seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED, "default": 0},
            "data": plugins("dataset"),
            "model": model,
            "ensemble": ensemble,
            "method": {"anyOf": [method, {"type": "array", "items": method}]},
            "training": training,
            "engine": section(EngineSection, "engine"),
            "extensions": {"type": "array", "items": plugins("extension")},
        },
        "$defs": definitions,
    }
