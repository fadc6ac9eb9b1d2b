"""The names of a new plugin package, all derived from one name, and whether they are available."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self

from ensemblekit.core.errors import UsageError
from ensemblekit.core.plugin import snake_case
from ensemblekit.core.registry import Registry

_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")


@dataclass(frozen=True)
class Names:
    """One name in its three forms: distribution `soft-min`, package `soft_min`, class `SoftMin`."""

    name: str
    """As the author wrote it, in any of the three forms."""
    package: str
    """The importable package, and the plugin's name in specs."""
    class_name: str

    @property
    def distribution(self) -> str:
        return self.package.replace("_", "-")

    @classmethod
    def of(cls, name: str) -> Self:
        """Derive all names from one.

        Raises:
            UsageError: The name is not valid; the error suggests one that is.
        """
        where = f"NAME {name!r}"
        if "/" in name or "\\" in name:
            parent, separator, last = name.rstrip("/\\").replace("\\", "/").rpartition("/")
            fix = f"ensemblekit new {last or 'NAME'} --dir {parent or separator or '.'}"
            raise UsageError("expected a name, got a path", where, fix)
        if not _WORDS.fullmatch(name):
            letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
            near = "-".join(re.findall(r"[A-Za-z][A-Za-z0-9]*", letters)) or "soft-min"
            fix = f"use letters, digits and single dashes, and start with a letter, for example: {near}"
            raise UsageError("not a valid name of a package", where, fix)
        package = snake_case(name.replace("-", "_"))
        camel_case = "".join(word.capitalize() for word in package.split("_"))
        # GNCL stays GNCL: its snake case is the same name again.
        class_name = name if name[0].isupper() and "-" not in name and "_" not in name else camel_case
        if keyword.iskeyword(package) or keyword.iskeyword(class_name):
            raise UsageError("a Python keyword", where, f"choose another name, for example: my-{package}")
        # A plugin without an entry point is named after its class, so the class must lead back to the same name.
        if snake_case(class_name) != package:
            what = f"the class would be {class_name}, whose name in specs is {snake_case(class_name)}"
            raise UsageError(what, where, f"use {snake_case(class_name)}")
        return cls(name, package, class_name)


def check_available(names: Names, kind: str, registry: Registry, imported: Collection[str]) -> None:
    """Check that the names of a new package are not taken.

    Args:
        names: The names of the new package.
        kind: Kind of plugin.
        registry: The installed plugins.
        imported: Names that the plugin's own file imports.

    Raises:
        UsageError: A plugin, a module, a distribution or an import has one of the names.
    """
    fix = f"choose another name, for example: {names.distribution}-{kind}"
    if names.class_name in imported:
        what = f"the class would shadow {names.class_name}, which its file imports"
        raise UsageError(what, f"NAME {names.name!r}", fix)
    if taken := registry.plugins(kind).get(names.package):
        packages = ", ".join((taken.package, *taken.rivals))
        raise UsageError(f'a {kind} "{names.package}" already exists', f"registered by {packages}", fix)
    if names.package in sys.stdlib_module_names:
        raise UsageError("the name of a module of Python's standard library", f"NAME {names.name!r}", fix)
    if module := _installed_module(names.package):
        raise UsageError("the name of an installed module", module, fix)
    try:
        installed = distribution(names.distribution)
    except PackageNotFoundError:
        return
    what = f"installing it would replace {installed.name} {installed.version}"
    raise UsageError(what, f"NAME {names.name!r}", fix)


def _installed_module(name: str) -> str | None:
    """Where a module of this name would be imported from; None if there is no such module."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.origin:
        return spec.origin
    # A directory in the working directory, perhaps the very one that the package goes to, is not an installed module.
    locations = [path for path in spec.submodule_search_locations or () if Path(path).parent != Path.cwd()]
    return locations[0] if locations else None
