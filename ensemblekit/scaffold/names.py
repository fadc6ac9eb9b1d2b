"""The names of a new plugin package, all derived from the one that its author gave, and whether they are free."""

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
    """`soft-min`, `soft_min` and `SoftMin` are one name, written as a distribution, a package and a class."""

    given: str
    package: str
    """Also the name in specs."""
    class_name: str

    @property
    def distribution(self) -> str:
        return self.package.replace("_", "-")

    @classmethod
    def of(cls, given: str) -> Self:
        """The names that follow from one, or a `UsageError` that says which would do."""
        where = f"NAME {given!r}"
        if "/" in given or "\\" in given:
            place, separator, last = given.rstrip("/\\").replace("\\", "/").rpartition("/")
            fix = f"ensemblekit new {last or 'NAME'} --dir {place or separator or '.'}"
            raise UsageError("a path, and a name is wanted", where, fix)
        if not _WORDS.fullmatch(given):
            letters = unicodedata.normalize("NFKD", given).encode("ascii", "ignore").decode()
            near = "-".join(re.findall(r"[A-Za-z][A-Za-z0-9]*", letters)) or "soft-min"
            fix = f"use letters, digits and single dashes after a letter, such as {near}"
            raise UsageError("not a name that a package can have", where, fix)
        package = snake_case(given.replace("-", "_"))
        camel_case = "".join(word.capitalize() for word in package.split("_"))
        # GNCL stays GNCL, since it is read back to the same name.
        class_name = given if given[0].isupper() and "-" not in given and "_" not in given else camel_case
        if keyword.iskeyword(package) or keyword.iskeyword(class_name):
            raise UsageError("a word of the Python language", where, f"use my-{package} or the like")
        # A plugin outside a registry is called as its class is, so the class must lead back to the name.
        if snake_case(class_name) != package:
            what = f"the class would be {class_name}, which is read as {snake_case(class_name)}"
            raise UsageError(what, where, f"use {snake_case(class_name)}")
        return cls(given, package, class_name)


def check_free(names: Names, kind: str, registry: Registry, imported: Collection[str]) -> None:
    """Refuse names that something else has, such as the names `imported` by the plugin's own file."""
    fix = f"choose another, such as {names.distribution}-{kind}"
    if names.class_name in imported:
        what = f"the class would hide {names.class_name}, which its file imports"
        raise UsageError(what, f"NAME {names.given!r}", fix)
    if taken := registry.plugins(kind).get(names.package):
        packages = ", ".join((taken.package, *taken.rivals))
        raise UsageError(f'there is a {kind} "{names.package}" already', f"registered by {packages}", fix)
    if names.package in sys.stdlib_module_names:
        raise UsageError("a module of Python's standard library", f"NAME {names.given!r}", fix)
    if module := _installed_module(names.package):
        raise UsageError("an importable module has this name", module, fix)
    try:
        installed = distribution(names.distribution)
    except PackageNotFoundError:
        return
    what = f"installing it would replace {installed.name} {installed.version}"
    raise UsageError(what, f"NAME {names.given!r}", fix)


def _installed_module(name: str) -> str | None:
    """Where a module of this name would be imported from; None if nowhere."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.origin:
        return spec.origin
    # A directory beside the author, perhaps the very one that the package will go to, is no module.
    places = [place for place in spec.submodule_search_locations or () if Path(place).parent != Path.cwd()]
    return places[0] if places else None
