"""The JSON Schema of a whole spec, with every installed plugin, for completion in editors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ensemblekit.core.errors import PluginError
from ensemblekit.core.nesting import PLUGIN
from ensemblekit.core.parameters import section_schema
from ensemblekit.core.plugin import Section
from ensemblekit.core.registry import Registry
from ensemblekit.spec.sections import ENTRIES


def spec_schema(registry: Registry, on_broken: Callable[[PluginError], None]) -> dict[str, Any]:
    """Return the schema of a spec; a plugin that cannot be loaded is left out and reported to `on_broken`."""
    builder = SchemaBuilder(registry, on_broken)
    properties: dict[str, Any] = {}
    # tables before the keys inside them
    for entry in sorted(ENTRIES.values(), key=lambda entry: "." in entry.path):
        *parents, key = entry.path.split(".")
        table = properties[parents[0]]["properties"] if parents else properties
        table[key] = entry.schema(builder)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ensemblekit run spec",
        "type": "object",
        "additionalProperties": False,
        "required": [entry.path for entry in ENTRIES.values() if entry.required],
        "properties": properties,
        "$defs": builder.definitions,
    }


class SchemaBuilder:
    """Makes the schemas of sections and plugins and collects the definitions that they share."""

    def __init__(self, registry: Registry, on_broken: Callable[[PluginError], None]) -> None:
        self.registry, self.on_broken = registry, on_broken
        self.definitions: dict[str, Any] = {}

    def section(self, section: type[Section], prefix: str) -> dict[str, Any]:
        """Return the schema of a section; `prefix` keeps its definitions apart from those of others."""
        schema = section_schema(section, ref_template=f"#/$defs/{prefix}.{{model}}")
        for name, definition in schema.pop("$defs", {}).items():
            self.definitions[f"{prefix}.{name}"] = definition
        if "properties" in schema:
            schema["properties"] = {key: self._with_plugins(value) for key, value in schema["properties"].items()}
        return schema

    def named(
        self, choices: Iterable[tuple[str, type[Section]]], prefix: str, default: str | None = None
    ) -> dict[str, Any]:
        """Return the schema of a section that is chosen by name: one of some tables, or a name alone.

        A table without a name is one of `default`.
        """
        tables, names = [], []
        for name, section in choices:
            schema = self.section(section, f"{prefix}.{name}")
            schema["properties"] = {**schema.get("properties", {}), "name": {"const": name}}
            others = [key for key in schema.get("required", []) if key != "name"]
            schema["required"] = others if name == default else ["name", *others]
            tables.append(schema)
            names.append(name)
        return {"oneOf": [{"enum": names, "description": "the name alone"}, *tables]} if names else {"not": {}}

    def plugins(self, kind: str) -> dict[str, Any]:
        """Return the schema of a plugin of a kind."""
        return self.named(self.usable(kind), kind)

    def usable(self, kind: str) -> list[tuple[str, type[Section]]]:
        """Return the plugins of a kind that can be loaded, by name."""
        usable: list[tuple[str, type[Section]]] = []
        for name, info in self.registry.plugins(kind).items():
            try:
                usable.append((name, info.load()))
            except PluginError as error:
                self.on_broken(error)
        return usable

    def _with_plugins(self, schema: Any) -> Any:
        """Return a schema with a reference to the plugins of a kind wherever it has any plugin of that kind."""
        if isinstance(schema, list):
            return [self._with_plugins(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        replaced = {key: value if key == "default" else self._with_plugins(value) for key, value in schema.items()}
        return replaced | self._reference(kind) if (kind := replaced.pop(PLUGIN, None)) else replaced

    def _reference(self, kind: str) -> dict[str, Any]:
        """Return a reference to the definition of a kind, since plugins may contain each other."""
        if kind not in self.definitions:
            self.definitions[kind] = {}  # ends the recursion, while plugins of the kind are described
            self.definitions[kind] = self.plugins(kind)
        return {"$ref": f"#/$defs/{kind}"}
