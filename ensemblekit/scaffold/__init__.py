"""Starts a plugin package: installable, tested and ready to train, with the author's name for it in every place.

The files are in `templates/`: those of `common/` are every kind's, the others one kind's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from ensemblekit.core.errors import UsageError
from ensemblekit.core.registry import GROUPS, Registry
from ensemblekit.runs.atomic import replacing, write_errors
from ensemblekit.scaffold.names import Names, check_free

SUMMARIES = {
    "method": "An ensembling method for ensemblekit.",
    "model": "A base model for ensemblekit.",
    "dataset": "A data set for ensemblekit.",
    "extension": "An extension for ensemblekit.",
}

# Where each file goes, and which template it is made from.
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
    """A package that was just made."""

    directory: Path
    files: tuple[Path, ...]


def create(name: str, kind: str, parent: Path, registry: Registry) -> NewPackage:
    """Make the directory `name` in `parent`, wholly or not at all; refuses names and places that are taken."""
    names = Names.of(name)
    contents = dict(_render(names, kind))
    check_free(names, kind, registry, _imported_names(contents[f"src/{names.package}/__init__.py"]))
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
    """The path of each file in the package, and its content."""
    values = {
        "kind": kind,
        "group": GROUPS[kind],
        "summary": SUMMARIES[kind],
        "directory": names.given,
        "distribution": names.distribution,
        "package": names.package,
        "registered": names.package,
        "class_name": names.class_name,
        # A local version such as 1.0+cpu cannot be asked for.
        "ensemblekit_version": version("ensemblekit").partition("+")[0],
    }
    templates = files("ensemblekit.scaffold") / "templates"
    for path, template in _FILES.items():
        source = templates / f"{Template(template).substitute(values)}.template"
        yield Template(path).substitute(values), Template(source.read_text(encoding="utf-8")).substitute(values)


def _imported_names(source: str) -> set[str]:
    """What a file imports; a class of one of these names would hide it."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _check_empty(directory: Path) -> None:
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError("the directory is not empty", str(directory), "choose another name, or another place by --dir")
    if directory.exists() and not directory.is_dir():
        raise UsageError("a file has this name", str(directory), "choose another name, or another place by --dir")
