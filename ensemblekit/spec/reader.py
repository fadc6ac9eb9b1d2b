"""Reads a spec: collects every problem before it gives up, each with its dotted path and what is allowed.

A spec can only name plugins that are installed or that a person gave on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from ensemblekit.core.errors import PluginError, Problem, SpecError, UsageError, choices
from ensemblekit.core.losses import Loss
from ensemblekit.core.parameters import readable, short
from ensemblekit.core.plugin import Dataset, Extension, Method, Model, Plugin, Section
from ensemblekit.core.registry import Registry
from ensemblekit.spec.optimizers import optimizer_classes, optimizer_section
from ensemblekit.spec.schedules import SCHEDULES
from ensemblekit.spec.sections import (
    DEFAULT_LOSS,
    DEFAULT_OPTIMIZER,
    DEFAULT_SCHEDULE,
    MAX_SEED,
    EngineSection,
    EnsembleSection,
    Group,
    Spec,
    TrainingSection,
)
from ensemblekit.spec.tables import override, read_toml

AnySection = TypeVar("AnySection", bound=Section)
AnyPlugin = TypeVar("AnyPlugin", bound=Plugin)


def load_spec(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None, registry: Registry) -> Spec:
    """Read and validate a spec; `overrides` maps dotted paths to values. Raises a `SpecError` with all problems."""
    name = "the given spec" if isinstance(source, Mapping) else str(source)
    tables = dict(deepcopy(source)) if isinstance(source, Mapping) else read_toml(Path(source))
    reader = _Reader(registry)
    for path, value in (overrides or {}).items():
        try:
            override(tables, path, value)
        except UsageError as error:
            reader.problems.append(Problem(error.where, error.what, error.fix))
    spec = reader.read(tables)
    if spec is None or reader.problems:
        raise SpecError(reader.problems, name)
    return spec


def build_plugin(base: type[AnyPlugin], value: str | Mapping[str, Any], registry: Registry) -> AnyPlugin:
    """One plugin from its table, or from its name alone."""
    reader = _Reader(registry)
    plugin = reader.plugin(base, value, base.kind)
    if plugin is None:
        raise SpecError(reader.problems, f"the given {base.kind}")
    return plugin


class _Reader:
    """Turns tables into a spec and collects the problems on the way."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.problems: list[Problem] = []

    def read(self, tables: dict[str, Any]) -> Spec | None:
        allowed = ("seed", "data", "model", "ensemble", "method", "training", "engine", "extensions")
        for key in tables:
            if key not in allowed:
                self.problems.append(Problem(str(key), "unknown key", choices(str(key), allowed)))
        seed = self._seed(tables.get("seed", 0))
        data = self._required(Dataset, tables, "data")
        model = self._required(Model, tables, "model")
        methods = self._listed(Method, tables.get("method", []), "method")
        table = self._table(tables.get("ensemble", {}), "ensemble")
        groups = self._groups(table.pop("groups", []), tables.get("model"))
        ensemble = self._ensemble(table, groups, methods)
        table = self._table(tables.get("training", {}), "training")
        loss = self.plugin(Loss, table.pop("loss", DEFAULT_LOSS), "training.loss")
        optimizer = self._chosen(
            table.pop("optimizer", DEFAULT_OPTIMIZER), "optimizer", optimizer_classes(), optimizer_section
        )
        schedule = self._chosen(table.pop("schedule", DEFAULT_SCHEDULE), "schedule", SCHEDULES, SCHEDULES.__getitem__)
        training = self._section(TrainingSection, table, "training", ("loss", "optimizer", "schedule"))
        engine = self._section(EngineSection, self._table(tables.get("engine", {}), "engine"), "engine")
        extensions = self._listed(Extension, tables.get("extensions", []), "extensions")
        if self.problems:
            return None
        parts = (
            *(seed, data, model, ensemble, groups, methods, training, loss, optimizer, schedule, engine),
            extensions,
        )
        spec = Spec(*cast("tuple[Any, ...]", parts))  # none of them is None where there is no problem
        self._cross_check(spec)
        return spec

    def plugin(self, base: type[AnyPlugin], value: Any, path: str) -> AnyPlugin | None:
        """The plugin that a table, or a name alone, stands for."""
        named = self._named(value, path)
        if named is None:
            return None
        name, table = named
        try:
            plugin_class = self.registry.get(base.kind, name).load()
        except PluginError as error:
            known = name in self.registry.plugins(base.kind)
            where = f" ({error.where})" if error.where else ""
            code = PluginError.exit_code if known else UsageError.exit_code
            self.problems.append(Problem(f"{path}.name", error.what + where, error.fix, code))
            return None
        plugin = self._section(cast("type[AnyPlugin]", plugin_class), table, path)
        return None if plugin is None else plugin.named(name)

    def _required(self, base: type[Plugin], tables: dict[str, Any], key: str) -> Plugin | None:
        if key in tables:
            return self.plugin(base, tables[key], key)
        available = ", ".join(self.registry.plugins(base.kind)) or "none is installed"
        self.problems.append(Problem(key, "missing", f'add [{key}] with name = "…"; installed: {available}'))
        return None

    def _listed(self, base: type[AnyPlugin], value: Any, path: str) -> tuple[AnyPlugin | None, ...]:
        """One plugin, or several in a list, none of them twice."""
        if not isinstance(value, list | tuple):
            return (self.plugin(base, value, path),)
        plugins = tuple(self.plugin(base, entry, f"{path}.{index}") for index, entry in enumerate(value))
        names = [plugin.name for plugin in plugins if plugin]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            self.problems.append(Problem(path, f'"{name}" is listed twice', "list each once"))
        return plugins

    def _groups(self, value: Any, model: Any) -> tuple[Group, ...]:
        """Groups of members; a group's model table changes keys of [model], or names another model."""
        if not isinstance(value, list | tuple):
            what = f"{short(value)} is not a list of tables"
            self.problems.append(Problem("ensemble.groups", what, "write [[ensemble.groups]] for each"))
            return ()
        base = {"name": model} if isinstance(model, str) else model if isinstance(model, Mapping) else {}
        groups = []
        for index, entry in enumerate(value):
            path = f"ensemble.groups.{index}"
            table = self._table(entry, path)
            changes = self._table(table.pop("model", {}), f"{path}.model")
            section = self._section(EnsembleSection, {"members": 1, **table}, path, ("model",))
            own_name = changes.get("name", base.get("name")) != base.get("name")
            plugin = self.plugin(Model, changes if own_name else {**base, **changes}, f"{path}.model")
            if section is not None and plugin is not None:
                groups.append(Group(section.members, plugin))
        return tuple(groups)

    def _ensemble(
        self, table: dict[str, Any], groups: Sequence[Group], methods: Sequence[Method | None]
    ) -> EnsembleSection | None:
        """The section, its number of members filled in from the groups or from a method that implies it."""
        implied = [(method.required_members(), f'the parameters of "{method.name}"') for method in methods if method]
        if groups:
            implied.append((sum(group.members for group in groups), "the groups"))
        section = self._section(EnsembleSection, table, "ensemble", ("groups",))
        for needed, reason in implied:
            if section is None or needed is None:
                continue
            if not isinstance(needed, int):
                raise PluginError(f"{reason} make {needed} members", "required_members()", "return an int, or None")
            if "members" not in section.model_fields_set:
                section = EnsembleSection(members=needed)
            elif section.members != needed:
                what = f"{section.members}, but {reason} make {needed} members"
                self.problems.append(Problem("ensemble.members", what, f"set it to {needed}, or leave it out"))
        return section

    def _chosen(
        self, value: Any, key: str, names: Iterable[str], section_of: Callable[[str], type[AnySection]]
    ) -> AnySection | None:
        """The section of training that a table, or a name alone, chooses."""
        path = f"training.{key}"
        named = self._named(value, path)
        if named is None:
            return None
        name, table = named
        if name not in names:
            self.problems.append(Problem(f"{path}.name", f'no {key} "{name}"', choices(name, names)))
            return None
        return self._section(section_of(name), {"name": name, **table}, path)

    def _seed(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
            self.problems.append(
                Problem("seed", f"{short(value)} is not a seed", f"give an integer from 0 to {MAX_SEED}")
            )
            return 0
        return value

    def _table(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        self.problems.append(Problem(path, f"{short(value)} is not a table", f"write [{path}] and its keys below"))
        return {}

    def _named(self, value: Any, path: str) -> tuple[str, dict[str, Any]] | None:
        """The name and the other keys of a table that chooses something by name."""
        if isinstance(value, str):
            return value, {}
        if not isinstance(value, Mapping):
            fix = f'write [{path}] with name = "…", or {path} = "…"'
            self.problems.append(Problem(path, f"{short(value)} is neither a table nor a name", fix))
            return None
        table = dict(value)
        name = table.pop("name", None)
        if not isinstance(name, str):
            what = "missing" if name is None else f"{short(name)} is not a name"
            self.problems.append(Problem(f"{path}.name", what, 'write name = "…"'))
            return None
        return name, table

    def _section(
        self, section: type[AnySection], table: dict[str, Any], path: str, more_keys: Sequence[str] = ()
    ) -> AnySection | None:
        try:
            return section.from_table(table)
        except ValidationError as error:
            self.problems += readable(error, section, path, more_keys)
        except (ValueError, TypeError, RecursionError) as error:  # nothing that TOML could hold
            self.problems.append(Problem(path, f"not plain values: {short(str(error))}", "use what TOML has"))
        return None

    def _cross_check(self, spec: Spec) -> None:
        listed = len(spec.methods) > 1
        sections: list[tuple[str, Plugin]] = [("data", spec.data), ("model", spec.model), ("training.loss", spec.loss)]
        sections += [(f"ensemble.groups.{i}.model", group.model) for i, group in enumerate(spec.groups)]
        sections += [(f"method.{i}" if listed else "method", method) for i, method in enumerate(spec.methods)]
        for path, plugin in sections:
            for problem in _problems(plugin, spec):
                elsewhere = problem.path.startswith("/")
                self.problems.append(
                    Problem(problem.path[1:], problem.what, problem.fix) if elsewhere else problem.under(path)
                )


def _problems(plugin: Plugin, spec: Spec) -> list[Problem]:
    """What a plugin has against a spec."""
    answer: Any = plugin.check_spec(spec)
    problems = list(answer) if isinstance(answer, Iterable) else [answer]
    if not all(isinstance(problem, Problem) for problem in problems):
        raise PluginError(
            f'plugin "{plugin.name}": check_spec() gives something else than Problems', fix="yield Problem(…)"
        )
    return problems
