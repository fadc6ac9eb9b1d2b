"""Writes the generated parts of the documentation from the program itself.

``python docs/generate.py`` writes them, ``--check`` only says which pages are out of date. A generated part stands
between ``<!-- generated: KIND ARGUMENTS -->`` and ``<!-- end -->``; KIND is one of the functions in `GENERATORS`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from click.testing import CliRunner

from ensemblekit.cli import main as command_line
from ensemblekit.data.corruptions import CORRUPTIONS, MAX_SMALL_SIDE

DOCS = Path(__file__).parent
PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@cache
def printed(*arguments: str) -> str:
    """Return the output of a command on a pipe."""
    result = CliRunner().invoke(command_line, arguments)
    if result.exit_code:
        sys.exit(f"error: ensemblekit {' '.join(arguments)} failed: {result.output}")
    return result.stdout


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    cells = [list(header), *map(list, rows)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def plugin(kind: str, name: str) -> str:
    """Return paper and parameters of a plugin, as `ensemblekit inspect` shows them."""
    page = json.loads(printed("inspect", name, "--kind", kind, "--json"))
    parts = [f"Paper: {page['paper']}."] if page["paper"] else []
    shared = _shared_names() if kind == "dataset" else set()
    fields = [field for field in page["parameters"] if field["name"] not in shared]
    parts.append(parameters(fields) if fields else "It has no parameters of its own.")
    return "\n\n".join(parts)


def shared_parameters() -> str:
    """The parameters of every data set of images, which are all that `digits` has."""
    return parameters(json.loads(printed("inspect", "digits", "--json"))["parameters"])


def _shared_names() -> set[str]:
    return {field["name"] for field in json.loads(printed("inspect", "digits", "--json"))["parameters"]}


def parameters(fields: Iterable[Mapping[str, Any]]) -> str:
    """The table of a plugin's parameters."""
    rows = []
    for field in fields:
        default = "required" if field["required"] else toml(field["default"])
        rows.append((f"`{field['name']}`", default, field["allowed"], field["description"]))
    return table(("parameter", "default", "allowed", "meaning"), rows)


def plugins(kind: str) -> str:
    """All plugins of a kind with their one-line descriptions."""
    entries = json.loads(printed("list", kind, "--json"))
    return table(("name", "description"), ((f"`{entry['name']}`", entry["description"]) for entry in entries))


def section(name: str) -> str:
    """The keys of a section of a spec that are plain values, from the JSON Schema."""
    properties = json.loads(printed("schema"))["properties"][name]["properties"]
    plain = {key: schema for key, schema in properties.items() if "oneOf" not in schema and "items" not in schema}
    return keys(plain)


def choices(key: str) -> str:
    """The names that a key of [training] takes, each with its own keys and their defaults."""
    tables = json.loads(printed("schema"))["properties"]["training"]["properties"][key]["oneOf"]
    rows = []
    for schema in tables:
        properties = dict(schema.get("properties", {}))
        if "name" in properties:
            name = properties.pop("name")["const"]
            rows.append((f"`{name}`", ", ".join(_key_and_default(*entry) for entry in properties.items()) or "none"))
    return table(("name", "keys and defaults"), rows)


def _key_and_default(name: str, schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return f"`{name}`" if default is None else f"`{name} = {toml(default).strip('`')}`"


def keys(properties: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of a section's keys."""
    rows = []
    for name, schema in properties.items():
        rows.append((f"`{name}`", toml(schema.get("default")), allowed(schema), schema.get("description", "")))
    return table(("key", "default", "allowed", "meaning"), rows)


def allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(allowed(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f'"{value}"' for value in schema["enum"])
    bounds = " and ".join(f"{sign} {schema[key]}" for key, sign in SIGNS.items() if key in schema)
    kind = {"boolean": "true or false"}.get(schema["type"], schema["type"])
    return f"{kind} {bounds}".strip()


def toml(value: Any) -> str:
    """A default as a spec would say it."""
    if value is None:
        return "not set"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str | list | dict) else f"{value:g}"
    return f"`{text}`"


def commands() -> str:
    """The help of every command, each as a console block with the text that it prints."""
    parts = []
    for name in sorted(command_line.commands):
        text = printed(name, "--help").rstrip()
        parts.append(f"### {name}\n\n```console\nensemblekit {name} --help\n```\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


def hooks() -> str:
    """A table of all hooks, and a section for each with its signature and its docstring."""
    module = importlib.import_module("ensemblekit.core.hookspecs")
    options = {name: getattr(value, "ensemblekit_spec", None) for name, value in vars(module).items()}
    functions = {name: getattr(module, name) for name, chosen in options.items() if chosen is not None}
    rows = [(f"[`{name}`](#{name})", _summary(function), _several(function)) for name, function in functions.items()]
    details = [
        f"### `{name}`\n\n`{_signature(function)}`\n\n{_prose(function)}" for name, function in functions.items()
    ]
    header = table(("hook", "purpose", "answers of several plugins"), rows)
    return "\n\n".join([header, *details])


def _summary(function: FunctionType) -> str:
    """The first sentence of the docstring."""
    return re.split(r"(?<=\w\W)\. |\.$|\. (?=[A-Z])", (inspect.getdoc(function) or "").partition("\n")[0])[0]


def _several(function: FunctionType) -> str:
    if str(inspect.signature(function).return_annotation) == "None":
        return "all are called"
    first: bool = function.ensemblekit_spec["firstresult"]  # type: ignore[attr-defined]
    return "the last listed that answers wins" if first else "they are multiplied"


def _signature(function: FunctionType) -> str:
    return f"{function.__name__}{inspect.signature(function)}".replace("'", "")


def _prose(function: FunctionType) -> str:
    """A docstring as Markdown; the sections of Google style become lists."""
    text = inspect.getdoc(function) or ""
    text = re.sub(r"^(Args|Returns|Raises):$", r"**\1**\n", text, flags=re.MULTILINE)
    return re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)


def recipe(name: str) -> str:
    """A plugin of the cookbook: its paragraph and the part of a spec from its docstring, and its code."""
    file = DOCS / "cookbook" / f"{name}.py"
    source = file.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, _, text = docstring.partition("\n\n")
    code = source.partition('"""')[2].partition('"""')[2].strip()
    code = code.removeprefix("from __future__ import annotations").strip()
    return f"### {title}\n\n{text}\n\n[`{file.name}`](cookbook/{file.name}):\n\n```python\n{code}\n```"


def corruptions() -> str:
    """A table of the corruptions of images and their parameters."""
    rows = []
    for name, corruption in CORRUPTIONS.items():
        values = [", ".join(f"{value:g}" for value in group) for group in (corruption.small, corruption.large)]
        rows.append((f"`{name}`", corruption.parameter, *values))
    small = f"severities 1 to 5, images up to {MAX_SMALL_SIDE} pixels"
    return table(("corruption", "parameter", small, "larger images"), rows)


def dependencies() -> str:
    """The names of the packages in each extra."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    rows = []
    for extra, requirements in project["optional-dependencies"].items():
        names = (re.split(r"[\[><=;]", requirement)[0] for requirement in requirements)
        rows.append((f"`{extra}`", ", ".join(names)))
    return table(("extra", "packages"), rows)


_ALL = (plugin, plugins, shared_parameters, section, choices, commands, hooks, recipe, corruptions, dependencies)
GENERATORS: dict[str, Callable[..., str]] = {function.__name__: function for function in _ALL}


def generated(text: str) -> str:
    """A page with all its generated parts written again."""

    def part(found: re.Match[str]) -> str:
        kind, *arguments = found.group(2).split()
        return f"{found.group(1)}\n{GENERATORS[kind](*arguments)}\n\n{found.group(3)}"

    return PART.sub(part, text)


def outdated_pages(write: bool) -> list[str]:
    """Return the names of the pages whose generated parts differ from the program; write them again if asked to."""
    names = []
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = generated(old)
        if new != old:
            names.append(page.name)
            if write:
                page.write_text(new, encoding="utf-8")
    return names


def main() -> None:
    """Write all pages, or say which ones are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    outdated = outdated_pages(write=not check)
    if check and outdated:
        sys.exit(f"error: out of date: {', '.join(outdated)}; run python docs/generate.py")


if __name__ == "__main__":
    main()
