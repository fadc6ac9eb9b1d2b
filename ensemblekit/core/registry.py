"""Finds plugins by their entry points. Listing plugins imports none of them; only those in use are imported.

`discover()` returns a registry; there is no global one. A plugin that cannot be imported is an error only
for those who use it, and two plugins with one name are an error that names both packages.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ensemblekit.core.errors import (
    PluginError,
    ResourceError,
    UsageError,
    did_you_mean,
    explain,
    is_out_of_memory,
    one_line,
)
from ensemblekit.core.kinds import KINDS

if TYPE_CHECKING:
    from ensemblekit.core.plugin import Plugin


@dataclass(frozen=True)
class PluginInfo:
    """One registered plugin; it is imported by `load` and by `error`, not before."""

    kind: str
    name: str
    target: str
    """Location of the class: `module:Class`."""
    package: str
    """The distribution that provides it, the path of a local file, or the argument of a Python call: `model=MyNet`."""
    version: str
    rivals: tuple[str, ...] = ()
    """Other packages that register the same name, which makes the name ambiguous."""
    local_class: type[Plugin] | None = None

    @property
    def description(self) -> str:
        """The first line of the class's docstring, read from its source without importing it; "" if it has none."""
        docstring = _static_docstring(self.target) if self.local_class is None else inspect.getdoc(self.local_class)
        return (docstring or "").strip().partition("\n")[0]

    @property
    def origin(self) -> str:
        """Package and version."""
        return f"{self.package} {self.version}".strip()

    def load(self) -> type[Plugin]:
        """Import the plugin's class and verify its kind and its hooks.

        Raises:
            PluginError: it cannot be imported, is not a plugin of its kind, or its name is ambiguous.
        """
        if self.rivals:
            packages = ", ".join(sorted((self.package, *self.rivals)))
            raise PluginError(
                f'{len(self.rivals) + 1} plugins are registered as {self.kind} "{self.name}"',
                f"packages {packages}",
                self._how_to_choose(),
            )
        return self.local_class or _load_class(self)

    def _how_to_choose(self) -> str:
        packages = (self.package, *self.rivals)
        local = [package for package in packages if package.endswith(".py") or _is_argument(package)]
        if local:
            return f"give the class in {local[0]} another name"
        return f"uninstall all but one, for example: pip uninstall {self.rivals[0]}"

    @property
    def error(self) -> str | None:
        """Why the plugin cannot be used, on one line, or None if it can; imports it."""
        try:
            self.load()
        except PluginError as error:
            return error.line
        return None


class Registry:
    """The installed plugins and those of local files."""

    def __init__(self, plugins: Iterable[PluginInfo]) -> None:
        by_name: dict[str, dict[str, PluginInfo]] = {kind: {} for kind in KINDS}
        for info in sorted(plugins, key=lambda info: (info.kind, info.name, info.package)):
            first = by_name[info.kind].get(info.name)
            if first is not None:
                rivals = (*first.rivals, info.package)
                info = PluginInfo(first.kind, first.name, first.target, first.package, first.version, rivals)
            by_name[info.kind][info.name] = info
        self._by_name = by_name

    def plugins(self, kind: str) -> Mapping[str, PluginInfo]:
        """Return all plugins of one kind by name."""
        return self._by_name[kind]

    def find(self, name: str) -> list[PluginInfo]:
        """Return the plugins of that name, of any kind."""
        return [plugins[name] for plugins in self._by_name.values() if name in plugins]

    def get(self, kind: str, name: str, package: str | None = None) -> PluginInfo:
        """Return one plugin.

        Args:
            kind: its kind, such as "method".
            name: its name in specs.
            package: the package that once provided it, for the hint of the error.

        Raises:
            PluginError: no plugin of that kind has this name.
        """
        if name in self._by_name[kind]:
            return self._by_name[kind][name]
        listed = f"ensemblekit list {KINDS[kind].plural}"
        what, python_fix = f'"{name}" is not a registered {kind}', ""
        if package is not None:
            what = f'{kind} "{name}" was passed in Python' if _is_argument(package) else what
            fix, python_fix = _how_to_provide(package)
        elif not re.fullmatch(r"[\w-]+", name):
            fix = f"give a plugin's short name, not a path or an import: {listed}"
        else:
            near = did_you_mean(name, self._by_name[kind])
            fix = f"{near} {listed} shows the installed ones".strip()
        raise PluginError(what, fix=fix, plugin=name, python_fix=python_fix)

    def with_classes(self, classes: Iterable[type[Plugin]]) -> Registry:
        """Return a registry that also has plugin classes defined in Python, each named after its class."""
        from ensemblekit.core.plugin import snake_case

        added = [
            class_info(cls, snake_case(cls.__name__), f"plugins=[{cls.__qualname__.rpartition('<locals>.')[2]}]")
            for cls in dict.fromkeys(classes)
        ]
        return self.with_plugins(info for info in added if self.name_of(info.load()) is None)

    def with_plugins(self, plugins: Iterable[PluginInfo]) -> Registry:
        """Return a registry that also has these plugins."""
        added = list(plugins)
        return Registry([*self, *added]) if added else self

    def with_replaced(self, plugin: PluginInfo) -> Registry:
        """Return a registry that has a plugin in place of the one of the same kind and name."""
        return Registry([*(info for info in self if (info.kind, info.name) != (plugin.kind, plugin.name)), plugin])

    def name_of(self, plugin_class: type[Plugin]) -> str | None:
        """Return the name under which a class is registered; None if it is not."""
        target = f"{plugin_class.__module__}:{plugin_class.__qualname__}"
        for name, info in self._by_name[plugin_class.kind].items():
            if info.local_class is plugin_class or (info.local_class is None and info.target == target):
                return name
        return None

    def __iter__(self) -> Iterator[PluginInfo]:
        for plugins in self._by_name.values():
            yield from plugins.values()


def discover(files: Iterable[str | Path] = ()) -> Registry:
    """Return a registry of all installed plugins and of the plugin classes in the given local Python files."""
    found = entry_points()  # once for all kinds: it reads a file of every installed distribution
    by_kind = [(kind.name, entry_point) for kind in KINDS.values() for entry_point in found.select(group=kind.group)]
    origins = {distribution: _origin(distribution) for distribution in {found.dist for _, found in by_kind}}
    installed = (PluginInfo(kind, found.name, found.value, *origins[found.dist]) for kind, found in by_kind)
    local = [info for file in files for info in load_file(file)]
    return Registry([*(info for info in installed if not any(_same_source(info, own) for own in local)), *local])


def class_info(plugin_class: type[Plugin], name: str, argument: str) -> PluginInfo:
    """Return the registration of a plugin class that was passed as an argument of a Python call.

    Raises:
        PluginError: it is not a class of a known kind, or violates the contract of its kind.
    """
    kind = getattr(plugin_class, "kind", None)
    if not isinstance(plugin_class, type) or kind not in KINDS:
        what = f"{plugin_class!r:.80} is not a plugin class"
        bases = ", ".join(kind.public_base for kind in KINDS.values())
        raise PluginError(what, argument, f"derive it from one of {bases}")
    target = f"{plugin_class.__module__}:{plugin_class.__qualname__}"
    checked = _checked(plugin_class, kind, name, target)
    return PluginInfo(kind, name, target, argument, "", local_class=checked)


def _is_argument(package: str) -> bool:
    """Whether a plugin was passed as an argument of a Python call."""
    return "=" in package and not package.endswith(".py")


def _how_to_provide(package: str) -> tuple[str, str]:
    """How to provide a plugin that a run needs, on the command line and in Python."""
    if package.endswith(".py"):
        return f"add --plugin {package}", f'pass the file: plugins=["{package}"]'
    if _is_argument(package):
        package = package.replace("<lambda>", "lambda: …")  # which has no name
        in_file = "put the class in a file and add --plugin FILE, or " if package.startswith("plugins=") else ""
        return f"{in_file}use the run from Python: ensemblekit.load(RUN, {package})", f"pass it again: {package}"
    return f"pip install {package}", f"pip install {package}"


def _same_source(installed: PluginInfo, local: PluginInfo) -> bool:
    """Whether a local file is the source of an installed plugin, and so takes its place."""
    if (installed.kind, installed.name) != (local.kind, local.name):
        return False
    module = find_module(installed.target.partition(":")[0])
    source = Path(module.origin) if module is not None and module.origin else None
    return source is not None and source.is_file() and source.samefile(local.package)


def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version of a distribution."""
    return (distribution.name, distribution.version) if distribution else ("unknown", "")


@cache
def _load_class(info: PluginInfo) -> type[Plugin]:
    entry_point = EntryPoint(info.name, info.target, KINDS[info.kind].group)
    try:
        loaded = entry_point.load()
    except (KeyboardInterrupt, ResourceError):
        raise
    except BaseException as error:  # a plugin may raise anything on import, SystemExit included
        if is_out_of_memory(error):
            raise explain(error) from error
        raise PluginError(
            f'{info.kind} "{info.name}" cannot be imported: {_import_failure(error)}',
            f"{info.target} of {info.origin}",
            f"fix or update it, or remove it: pip uninstall {info.package}",
        ) from error
    return _checked(loaded, info.kind, info.name, f"{info.target} of {info.origin}")


def _checked(loaded: object, kind: str, name: str, where: str) -> type[Plugin]:
    from ensemblekit.core.plugin import Plugin
    from ensemblekit.core.verification import verify_hooks, verify_overrides

    if not (isinstance(loaded, type) and issubclass(loaded, Plugin) and loaded.kind == kind):
        raise PluginError(
            f'{kind} "{name}" is not a class of that kind', where, f"derive it from {KINDS[kind].public_base}"
        )
    if loaded.__abstractmethods__:
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        fix = f"define it as {KINDS[kind].public_base} declares it"
        raise PluginError(f'{kind} "{name}" does not define {missing}()', where, fix)
    if loaded.__init__ is not Plugin.__init__:
        fix = 'declare its parameters as fields: strength: float = Field(1.0, description="…")'
        raise PluginError(f'{kind} "{name}" defines __init__(), which plugins must not', where, fix)
    verify_overrides(loaded, name)
    verify_hooks(loaded, name)
    return loaded


def _import_failure(error: BaseException) -> str:
    """Describe what was raised on import, and where in the source."""
    what = f"{error.msg}, line {error.lineno} of {error.filename}" if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {one_line(what)}"


def load_file(file: str | Path) -> list[PluginInfo]:
    """Import the plugin classes of one Python file; each is named after its class (`SoftMin` → `soft_min`)."""
    from ensemblekit.core.plugin import Plugin, snake_case

    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        what = "no such file" if path.suffix == ".py" and not path.exists() else "not a Python file"
        raise UsageError(what, str(file), "give the path of a .py file with plugin classes")
    module = _import_file(path)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Plugin)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
        and not (value.__abstractmethods__ and value.__subclasses__())  # a base class of other plugins
    ]
    if not classes:
        raise PluginError(
            "the file has no plugin class",
            str(path),
            "derive a class from ensemblekit.Method, Model, Dataset or another base",
        )
    return [
        PluginInfo(
            cls.kind,
            snake_case(cls.__name__),
            f"{path}:{cls.__name__}",
            str(path),
            "",
            local_class=_checked(cls, cls.kind, snake_case(cls.__name__), str(path)),
        )
        for cls in classes
    ]


def _import_file(path: Path) -> ModuleType:
    module_name = f"ensemblekit_local_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pydantic looks up the names in annotations there
    try:
        spec.loader.exec_module(module)
    except (KeyboardInterrupt, ResourceError):
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            raise explain(error) from error
        fix = _neighbour_fix(error, path) or "fix the file"
        raise PluginError(f"cannot be imported: {_import_failure(error)}", str(path), fix) from error
    return module


def _neighbour_fix(error: BaseException, path: Path) -> str:
    """How to import a module that lies beside a plugin file, if that is what failed; "" if not."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    folder = path.absolute().parent
    beside = next((place for place in (folder / f"{name}.py", folder / name) if name and place.exists()), None)
    if beside is None:
        return ""
    run = f"run with PYTHONPATH={shlex.quote(str(folder))}"
    return f"{beside.name} lies beside it, where Python does not look: {run}, or make a package: ensemblekit new NAME"


def _static_docstring(target: str) -> str | None:
    module, _, class_name = target.partition(":")
    try:
        spec = find_module(module)
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse(Path(spec.origin).read_bytes())
    except Exception:  # a description is never worth failing for: the error shows when the plugin is used
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return ast.get_docstring(node)
    return None


def find_module(name: str) -> ModuleSpec | None:
    """Find where a module would be imported from, without importing its parent packages."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    for part in rest:
        if spec is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec
