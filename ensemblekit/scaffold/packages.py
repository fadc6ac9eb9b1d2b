"""Writes a new plugin package from the templates."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from ensemblekit.core.errors import UsageError
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.registry import Registry
from ensemblekit.runs.atomic import replacing, write_errors
from ensemblekit.scaffold.names import Names, check_available

# Each file of the package, and the template that it comes from.
_FILES = {
    "pyproject.toml": "common/pyproject.toml",
    "README.md": "common/README.md",
    ".gitignore": "common/gitignore",
    "spec.toml": "$kind/spec.toml",
    "src/$package/__init__.py": "$kind/plugin.py",
    "tests/test_$package.py": "$kind/test.py",
}


@dataclass(frozen=True)
class NewPackage:
    """A package that was just written."""

    directory: Path
    files: tuple[Path, ...]


def create(name: str, kind: str, parent: Path, registry: Registry) -> NewPackage:
    """Write a plugin package, completely or not at all.

    Args:
        name: Name of the plugin and of the new directory: `soft-min`, `soft_min` or `SoftMin`.
        kind: Kind of plugin, one with a template in `KINDS`.
        parent: Where the new directory goes; created if necessary.
        registry: The installed plugins, whose names are taken.

    Returns:
        The directory and the files in it.

    Raises:
        UsageError: The name is not valid or taken, or the directory is not empty.
        RunError: The directory cannot be written.
    """
    names = Names.of(name)
    contents = dict(_render(names, kind))
    check_available(names, kind, registry, _imported_names(contents[f"src/{names.package}/__init__.py"]))
    directory = parent / name
    _check_empty(directory)
    with write_errors(directory):
        parent.mkdir(parents=True, exist_ok=True)
    with replacing(directory) as (staged,):
        for path, content in contents.items():
            file = staged / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8", newline="\n")
    return NewPackage(directory, tuple(directory / path for path in contents))


def _render(names: Names, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each file in the package, and its content."""
    values = {
        "kind": kind,
        "word": kind.replace("dataset", "data set"),
        "group": KINDS[kind].group,
        "summary": KINDS[kind].template,
        "directory": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "registered": names.package,
        "class_name": names.class_name,
        # A local version such as 1.0+cpu cannot be a requirement.
        "ensemblekit_version": version("ensemblekit").partition("+")[0],
    }
    templates = files("ensemblekit.scaffold") / "templates"
    for path, template in _FILES.items():
        source = templates / f"{Template(template).substitute(values)}.template"
        yield Template(path).substitute(values), Template(source.read_text(encoding="utf-8")).substitute(values)


def _imported_names(source: str) -> set[str]:
    """The names that a file imports; a class of the same name would shadow one of them."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _check_empty(directory: Path) -> None:
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(
            "the directory is not empty", str(directory), "choose another name, or another directory with --dir"
        )
    if directory.exists() and not directory.is_dir():
        raise UsageError("a file has this name", str(directory), "choose another name, or another directory with --dir")
