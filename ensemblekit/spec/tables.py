"""Plain tables: reads TOML files, and applies `--set` overrides of single values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import Problem, SpecError, UsageError


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file; a `SpecError` says at which line and column it is wrong."""
    text = ""
    try:
        text = path.read_bytes().decode()
        return tomllib.loads(text)
    except OSError as error:
        fix = "give the path of a TOML file"
        raise SpecError([Problem("", f"cannot be read: {error.strerror}", fix)], str(path)) from error
    except UnicodeDecodeError as error:
        raise SpecError([Problem("", f"not UTF-8 text: byte {error.start}", "save it as UTF-8")], str(path)) from error
    except (ValueError, RecursionError) as error:  # ValueError includes tomllib's own, with line and column
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        lines = text.split("\n")
        reason = reason.replace("at end of document", f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end")
        raise SpecError(
            [Problem("", f"not TOML: {reason}", "see https://toml.io for the format")], str(path)
        ) from error


def parse_override(text: str) -> tuple[str, Any]:
    """Split `a.b=value` into path and value; the value is read as TOML, anything else without quotes as a string."""
    path, equals, value = text.partition("=")
    path, value = path.strip(), value.strip()
    if not equals or not path or not value:
        raise UsageError(f'expected KEY=VALUE, got "{text}"', "--set", "write, for example, --set training.epochs=3")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError) as error:
        if value[0] in "[{\"'":
            raise UsageError(
                f'"{value}" is not a TOML value: {error}', f"--set {path}", "close the quote or bracket"
            ) from error
        return path, value
    return path, parsed["value"] if len(parsed) == 1 else value


def override(tables: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path in place; missing tables are created, lists are indexed from 0."""
    *parents, last = path.split(".")
    table: Any = tables
    for depth, part in enumerate(parents):
        inner = _item(table, part, path)
        if isinstance(inner, str) and inner:
            inner = {"name": inner}  # a plugin given by its name alone
        elif inner is None:
            inner = {}
        elif not isinstance(inner, dict | list):
            where = ".".join(parents[: depth + 1])
            raise UsageError(f"{where} is a value, not a table", path, f"set {where} itself")
        _set_item(table, part, inner)
        table = inner
    _item(table, last, path)
    _set_item(table, last, value)


def _item(table: Any, key: str, path: str) -> Any:
    if isinstance(table, dict):
        return table.get(key)
    if key.isdecimal() and int(key) < len(table):
        return table[int(key)]
    raise UsageError(f'there is no entry "{key}" in a list of {len(table)}', path, "count from 0, as in method.0.name")


def _set_item(table: Any, key: str, value: Any) -> None:
    table[key if isinstance(table, dict) else int(key)] = value
