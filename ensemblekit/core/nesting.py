"""Plugins that are parameters of other plugins: how pydantic validates, writes and describes such a field.

A table is validated as JSON, which cannot contain an instance. So the reader of a spec makes the inner plugins first,
with a registry, and the JSON refers to them by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import GetCoreSchemaHandler, PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

if TYPE_CHECKING:
    from ensemblekit.core.plugin import Plugin

T = TypeVar("T")
_NUMBER = "$plugin"
PLUGIN = "plugin"
"""The keyword of a JSON schema that stands for any plugin of a kind: ``{"plugin": "model"}``."""


def field_schema(base: type[Plugin], handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return the schema of a field whose values are plugins of a class."""
    as_field = Annotated[
        Any,
        PlainValidator(partial(_checked, base)),
        PlainSerializer(lambda plugin: plugin.to_table()),
        WithJsonSchema({PLUGIN: base.kind}),
    ]
    return handler.generate_schema(as_field)


def _checked(base: type[Plugin], value: Any, info: ValidationInfo) -> Any:
    if info.mode == "json" and info.context and isinstance(value, dict) and value.keys() == {_NUMBER}:
        value = info.context[value[_NUMBER]]
    if isinstance(value, base):
        return value
    given = f'"{value.name}"' if hasattr(value, "to_table") else repr(value)[:60]
    raise PydanticCustomError(PLUGIN, "{given} is not a {base}", {"given": given, "base": base.__name__})


def numbered(of: type[T], value: Any) -> tuple[Any, list[T]]:
    """Return a value with a number in place of every instance of a class, and the instances by number."""
    instances: list[T] = []

    def number(instance: T) -> dict[str, int]:
        instances.append(instance)
        return {_NUMBER: len(instances) - 1}

    return replaced(of, value, number), instances


def replaced(of: type[T], value: Any, by: Callable[[T], Any]) -> Any:
    """Return a value with every instance of a class in it replaced, in lists and tables too."""
    if isinstance(value, of):
        return by(value)
    if isinstance(value, list | tuple):
        items = (replaced(of, item, by) for item in value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    if isinstance(value, Mapping):
        return {key: replaced(of, item, by) for key, item in value.items()}
    return value


def found(of: type[T], value: Any, path: str) -> Iterator[tuple[str, T]]:
    """Yield the instances of a class in a value, each with its dotted path, which begins with that of the value."""
    if isinstance(value, of):
        yield path, value
    elif isinstance(value, list | tuple | Mapping):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from found(of, item, f"{path}.{key}")
