"""The parameters of a section in words: types, allowed values, and errors that name the key in TOML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic.json_schema import DEFAULT_REF_TEMPLATE, GenerateJsonSchema

from ensemblekit.core.errors import Problem, choices, did_you_mean
from ensemblekit.core.nesting import PLUGIN, replaced
from ensemblekit.core.plugin import Plugin, Section

_WORDS = {
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
    "an object": "a table",
    "a valid boolean": "true or false",
}
"""What pydantic calls the types of JSON and Python, and what TOML calls them."""
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a section; a default of None means that it is required or may be left out."""

    name: str
    type: str
    default: Any
    required: bool
    allowed: str
    description: str


def parameters(section: type[Section]) -> list[Parameter]:
    """Return all parameters of a section, in the order of its fields."""
    required = section_schema(section).get("required", [])
    return [
        Parameter(
            name=name,
            type=_type(schema),
            default=_default(schema),
            required=name in required,
            allowed=allowed_values(schema),
            description=schema.get("description", ""),
        )
        for name, schema in field_schemas(section).items()
    ]


def _default(schema: dict[str, Any]) -> Any:
    """Return the default; None if TOML cannot express it, such as the (None, 0.001) of an optimizer."""
    default = schema.get("default")
    return None if isinstance(default, list) and None in default else default


class _SchemaGenerator(GenerateJsonSchema):
    """Writes a default that is a plugin as its table."""

    def encode_default(self, dft: Any) -> Any:
        return super().encode_default(replaced(Plugin, dft, lambda plugin: plugin.to_table()))


def section_schema(section: type[Section], ref_template: str = DEFAULT_REF_TEMPLATE) -> dict[str, Any]:
    """Return the JSON schema of a section; the keyword "plugin" stands for any plugin of a kind."""
    return section.model_json_schema(by_alias=True, ref_template=ref_template, schema_generator=_SchemaGenerator)


@cache
def field_schemas(section: type[Section]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each field by the field's name in TOML."""
    schemas: dict[str, dict[str, Any]] = section_schema(section).get("properties", {})
    return schemas


def plugin_kind(schema: dict[str, Any]) -> str | None:
    """Return the kind of the plugins that values of a JSON schema contain, in lists and tables too; None if none."""
    if PLUGIN in schema:
        return str(schema[PLUGIN])
    parts = [*schema.get("anyOf", []), *schema.get("prefixItems", [])]
    parts += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return next(filter(None, map(plugin_kind, parts)), None)


def allowed_values(schema: dict[str, Any]) -> str:
    """Write the values that a field's JSON schema allows in words: `number ≥ 0 and ≤ 1`."""
    if "anyOf" in schema:
        kinds = (allowed_values(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if PLUGIN in schema:
        return f"name or table of a {schema[PLUGIN]}"
    if literals := _literals(schema):
        return ", ".join(toml_value(value) for value in literals)
    if schema.get("type") == "array":
        items = schema.get("items") or {"anyOf": schema.get("prefixItems", [{}])}
        return f"list of {allowed_values(items)}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"table of {allowed_values(values)}"
    bounds = " and ".join(f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema)
    return f"{_type(schema)} {bounds}".strip()


def _literals(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null"))
    words = {"object": "table", "array": "list", "boolean": "true or false"}
    if PLUGIN in schema:
        return str(schema[PLUGIN])
    types = schema.get("type", "any")
    return " or ".join(words.get(name, name) for name in ([types] if isinstance(types, str) else types))


def toml_value(value: Any) -> str:
    """Write a value as TOML, on one line."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        items = [f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()]
        return "{ " + ", ".join(items) + " }" if items else "{}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _toml_key(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def short(value: Any) -> str:
    """Write a value for an error message, shortened if it is long."""
    text = repr(value) if len(str(type(value))) < 100 else "?"
    return text if len(text) <= 60 else text[:57] + "…"


def problems_from(
    error: ValidationError, section: type[Section], path: str, other_keys: Sequence[str] = ()
) -> Iterable[Problem]:
    """Turn pydantic's errors into problems that name the key in TOML, the value and what is allowed."""
    schemas = field_schemas(section)
    for detail in error.errors(include_url=False):
        location = [str(part) for part in detail["loc"]]
        key = location[0] if location else ""
        where = ".".join([path, *location])
        allowed = f"allowed: {allowed_values(schemas[key])}" if key in schemas else ""
        if detail["type"] == "extra_forbidden":
            yield Problem(where, "unknown key", choices(key, [*schemas, *other_keys]), "unknown_key")
        elif detail["type"] == "missing":
            yield Problem(where, "missing", allowed)
        elif detail["type"] == PLUGIN:  # whose message names the plugin; the value is only its number
            yield Problem(where, detail["msg"], allowed)
        else:
            value = detail["input"]
            message = _in_words_of_toml(detail["msg"].removeprefix("Value error, ").removeprefix("Input "))
            near = did_you_mean(value, _literals(schemas.get(key, {}))) if isinstance(value, str) else ""
            if detail["type"] == "value_error":  # raised by the section's own check, whose message says what is allowed
                allowed = ""
            yield Problem(where, f"{short(value)} {message}" if key else message, f"{near} {allowed}".strip())


def _in_words_of_toml(message: str) -> str:
    for word, of_toml in _WORDS.items():
        message = message.replace(f"should be {word}", f"should be {of_toml}")
    return message
