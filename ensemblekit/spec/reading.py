"""Turns single values of a spec into plugins and sections, and collects every problem on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from ensemblekit.core.errors import PluginError, Problem, choices
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.nesting import PLUGIN
from ensemblekit.core.parameters import field_schemas, plugin_kind, problems_from, short
from ensemblekit.core.plugin import Plugin, Section
from ensemblekit.core.registry import Registry

AnySection = TypeVar("AnySection", bound=Section)
AnyPlugin = TypeVar("AnyPlugin", bound=Plugin)


class Reader:
    """Reads values with a registry of plugins; what cannot be read is None, and a problem says why."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.problems: list[Problem] = []
        self.tables: dict[str, Any] = {}
        """The whole spec as written."""
        self.values: dict[str, Any] = {}
        """The parts of the spec that have been read so far, by attribute."""

    def problem(self, path: str, what: str, fix: str = "") -> None:
        """Add a problem of the key at a dotted path."""
        self.problems.append(Problem(path, what, fix))

    def plugin(self, base: type[AnyPlugin], value: Any, path: str, default: str | None = None) -> AnyPlugin | None:
        """Read a plugin from its table, or from its name alone; a table without a name is one of `default`."""
        named = self.named(value, path, default)
        if named is None:
            return None
        name, table = named
        try:
            plugin_class = self.registry.get(base.kind, name).load()
        except PluginError as error:
            known = name in self.registry.plugins(base.kind)
            what = f"{error.what} ({error.where})" if error.where else error.what
            code = "broken_plugin" if known else "unknown_plugin"
            self.problems.append(Problem(f"{path}.name", what, error.fix, code))  # type: ignore[arg-type]
            return None
        plugin = self.section(cast("type[AnyPlugin]", plugin_class), table, path)
        return None if plugin is None else plugin.named(name)

    def choice(
        self, value: Any, path: str, names: Iterable[str], section_of: Callable[[str], type[AnySection]], default: str
    ) -> AnySection | None:
        """Read a section that is chosen by name, from its name or from its table, which may leave the name out."""
        named = self.named(value, path, default)
        if named is None:
            return None
        name, table = named
        if name not in names:
            kind = path.rpartition(".")[2]
            self.problem(f"{path}.name", f'there is no {kind} "{name}"', choices(name, names))
            return None
        return self.section(section_of(name), {"name": name, **table}, path)

    def section(
        self, section: type[AnySection], table: Mapping[str, Any], path: str, other_keys: Sequence[str] = ()
    ) -> AnySection | None:
        """Validate a table; `other_keys` are allowed beside the section's own, for the hint of an unknown key."""
        unread: list[str] = []
        try:
            inner, unread = self._inner_plugins(section, table, path)
            read = section.from_table({key: value for key, value in table.items() if key not in unread} | inner)
            # inner plugins that come from defaults are not set by the spec
            defaults = inner.keys() - table.keys()
            fields = section.model_fields.items()
            read.model_fields_set.difference_update(name for name, field in fields if (field.alias or name) in defaults)
            written = read.to_table()
            if isinstance(read, Plugin):
                written.pop("name")
            # a run keeps its spec with every default, and has to be able to read it
            section.from_table(written | inner)
            return None if unread else read
        except ValidationError as error:
            problems = problems_from(error, section, path, other_keys)
            # an inner plugin with problems of its own is not missing
            self.problems += (
                problem for problem in problems if problem.path not in {f"{path}.{key}" for key in unread}
            )
        except (ValueError, TypeError, RecursionError) as error:  # values that TOML has no form for
            fix = "use strings, numbers, booleans, lists or tables"
            self.problem(path, f"cannot be written as TOML: {short(str(error))}", fix)
        return None

    def _inner_plugins(
        self, section: type[Section], table: Mapping[str, Any], path: str
    ) -> tuple[dict[str, Any], list[str]]:
        """Read the fields of a section that are plugins; return them, and the keys of those that have problems."""
        inner: dict[str, Any] = {}
        unread = []
        for key, schema in field_schemas(section).items():
            value = table.get(key, schema.get("default"))
            if value is None or not plugin_kind(schema):
                continue
            problems = len(self.problems)
            inner[key] = self._with_plugins(schema, value, f"{path}.{key}")
            if len(self.problems) > problems:
                unread.append(key)
                del inner[key]
        return inner, unread

    def _with_plugins(self, schema: Mapping[str, Any], value: Any, path: str) -> Any:
        """Return a value with plugins in place of their tables and names, wherever its JSON schema has plugins."""
        choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
        for choice in choices:
            if isinstance(value, list | tuple) and choice.get("type") == "array":
                first, others = choice.get("prefixItems", []), choice.get("items", {})
                schemas = [*first, *[others] * (len(value) - len(first))]
                return [
                    self._with_plugins(of_item, item, f"{path}.{index}")
                    for index, (of_item, item) in enumerate(zip(schemas, value, strict=False))
                ]
            if isinstance(value, Mapping) and isinstance(values := choice.get("additionalProperties"), dict):
                return {key: self._with_plugins(values, item, f"{path}.{key}") for key, item in value.items()}
            if PLUGIN in choice and (isinstance(value, str | Mapping) or len(choices) == 1):
                default = schema.get("default")
                name = default.get("name") if isinstance(default, Mapping) else None
                return self.plugin(KINDS[choice[PLUGIN]].base_class, value, path, name)
        return value

    def table(self, value: Any, path: str) -> dict[str, Any]:
        """Return a copy of a table; an empty one, and a problem, if the value is not a table."""
        if isinstance(value, Mapping):
            return dict(value)
        self.problem(path, f"{short(value)} is not a table", f"write [{path}] and its keys below")
        return {}

    def named(self, value: Any, path: str, default: str | None = None) -> tuple[str, dict[str, Any]] | None:
        """Split a table that chooses something by name into the name and the other keys."""
        if isinstance(value, str):
            return value, {}
        if not isinstance(value, Mapping):
            fix = f'write [{path}] with name = "…", or {path} = "…"'
            self.problem(path, f"{short(value)} is neither a table nor a name", fix)
            return None
        table = dict(value)
        name = table.pop("name", default)
        if not isinstance(name, str):
            what = "missing" if name is None else f"{short(name)} is not a name"
            self.problem(f"{path}.name", what, 'write name = "…"')
            return None
        return name, table
