"""How each part of a spec is read, written, described in the JSON Schema and shown in an overview: one class each.

`Spec` in sections.py says which part has which entry; reader, `to_dict`, schema and overview all go through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ensemblekit.core.errors import PluginError
from ensemblekit.core.parameters import Parameter, parameters, short, toml_value
from ensemblekit.core.plugin import Method, Plugin, Section, Task
from ensemblekit.core.registry import PluginInfo, Registry
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.spec.reading import Reader
from ensemblekit.spec.unavailable import Unavailable

if TYPE_CHECKING:
    from ensemblekit.spec.schema import SchemaBuilder

MISSING: Any = object()
"""Stands for a key that a spec does not have."""
Rows = Iterator[tuple[str, str]]
"""Lines of an overview: a label and a text."""


@dataclass(frozen=True)
class Entry(ABC):
    """One part of a spec: an attribute of `Spec`, and a key in a TOML file."""

    path: str
    """The dotted path of its key."""
    required: bool = False
    only_training: bool = False
    """Whether only training needs it: a run can then be loaded where it cannot be read."""

    @abstractmethod
    def read(self, reader: Reader, value: Any) -> Any:
        """Read the value of the key; `MISSING` if there is none. Mistakes are added to the reader's problems."""

    def unavailable(self, value: Any) -> Any:
        """Return what stands for a value that cannot be read; `write` writes it as it was."""
        return Unavailable.of(value)

    @abstractmethod
    def write(self, value: Any) -> Any:
        """Return what `read` reads back to an equal value; `MISSING` to leave the key out."""

    @abstractmethod
    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        """Return the JSON Schema of the key."""

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        """Describe the keys of its table, without the name that it is chosen by; none if it is not a table.

        Args:
            registry: the plugins that it can name.
            name: its choice, if it is chosen by name. Default: its own default.
        """
        return []

    def choices(self, registry: Registry) -> Collection[str]:
        """Return the names that it can be chosen by; none if it is not chosen by name."""
        return ()

    def rows(self, value: Any) -> Rows:
        """Yield the lines of an overview."""
        yield self.path.rpartition(".")[2], str(value)

    def plugins(self, value: Any) -> Iterator[tuple[str, Plugin]]:
        """Yield the plugins in it, each with its dotted path."""
        return iter(())


@dataclass(frozen=True)
class IntegerEntry(Entry):
    """An integer from 0 to `maximum`."""

    maximum: int = 2**63 - 1

    def read(self, reader: Reader, value: Any) -> int:
        if value is MISSING:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= self.maximum:
            reader.problem(
                self.path, f"{short(value)} is not a {self.path}", f"give an integer from 0 to {self.maximum}"
            )
            return 0
        return value

    def write(self, value: int) -> int:
        return value

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        return {"type": "integer", "minimum": 0, "maximum": self.maximum, "default": 0}


@dataclass(frozen=True)
class PluginEntry(Entry):
    """One plugin of a kind; its table, or its name alone."""

    base: type[Plugin] = Plugin
    default: str | None = None
    may_lack_name: bool = False
    """Whether a table without a name is one of `default`."""

    def read(self, reader: Reader, value: Any) -> Plugin | None:
        if value is not MISSING:
            return reader.plugin(self.base, value, self.path, self.default if self.may_lack_name else None)
        if self.default is not None:
            return reader.plugin(self.base, self.default, self.path)
        installed = ", ".join(reader.registry.plugins(self.base.kind)) or "none"
        reader.problem(self.path, "missing", f'add [{self.path}] with name = "…"; installed: {installed}')
        return None

    def write(self, value: Plugin) -> Any:
        table = value.to_table()
        # a plugin that is a detail of another section is written by its name alone where that says it all
        return table["name"] if len(table) == 1 and "." in self.path else table

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        if self.may_lack_name:
            return builder.named(builder.usable(self.base.kind), self.base.kind, self.default)
        schema = builder.plugins(self.base.kind)
        return schema if self.default is None else {**schema, "default": self.default}

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        name = name or (self.default or "" if self.may_lack_name else "")
        return plugin_fields(registry.plugins(self.base.kind).get(name))

    def choices(self, registry: Registry) -> Collection[str]:
        return registry.plugins(self.base.kind)

    def rows(self, value: Plugin) -> Rows:
        # of plugins with many common parameters only those that the spec sets
        shown = value.model_fields_set if self.base.kind in ("dataset", "loss", "schedule") else None
        yield self.path.rpartition(".")[2], section_text(value, shown)

    def plugins(self, value: Plugin | Unavailable | None) -> Iterator[tuple[str, Plugin]]:
        if isinstance(value, Plugin):
            yield self.path, value


@dataclass(frozen=True)
class OptionalPluginEntry(PluginEntry):
    """One plugin of a kind that a spec need not have; None then."""

    def read(self, reader: Reader, value: Any) -> Plugin | None:
        return None if value is MISSING else super().read(reader, value)

    def write(self, value: Plugin | None) -> Any:
        return MISSING if value is None else super().write(value)

    def rows(self, value: Plugin | None) -> Rows:
        if value is not None:
            yield from super().rows(value)


@dataclass(frozen=True)
class LossEntry(PluginEntry):
    """The loss; its default depends on the task of the data, if that is known before loading."""

    by_task: Mapping[Task, str] = field(default_factory=dict)
    """The default for each task."""

    def read(self, reader: Reader, value: Any) -> Plugin | None:
        data = reader.values.get("data")
        task = None if data is None else data.known_task
        name = self.default if task is None else self.by_task[task]
        if isinstance(value, Mapping):
            return super().read(reader, {"name": name, **value})
        return super().read(reader, name if value is MISSING else value)


@dataclass(frozen=True)
class PluginsEntry(Entry):
    """Any number of plugins of a kind: a list of tables or names; `single` also allows one without a list."""

    base: type[Plugin] = Plugin
    single: bool = False

    def read(self, reader: Reader, value: Any) -> tuple[Plugin | None, ...]:
        if value is MISSING:
            return ()
        if not isinstance(value, list | tuple):
            return (reader.plugin(self.base, value, self.path),)
        plugins = tuple(reader.plugin(self.base, item, f"{self.path}.{index}") for index, item in enumerate(value))
        names = [plugin.name for plugin in plugins if plugin]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            reader.problem(self.path, f'"{name}" is listed twice', "list each once")
        return plugins

    def unavailable(self, value: Any) -> tuple[Unavailable, ...]:
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(Unavailable.of(item) for item in listed)

    def write(self, value: tuple[Plugin, ...]) -> Any:
        tables = [plugin.to_table() for plugin in value]
        if self.single:
            return tables[0] if len(tables) == 1 else tables
        return tables or MISSING

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        plugin = builder.plugins(self.base.kind)
        several = {"type": "array", "items": plugin}
        return {"anyOf": [plugin, several]} if self.single else several

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        return plugin_fields(registry.plugins(self.base.kind).get(name))

    def choices(self, registry: Registry) -> Collection[str]:
        return registry.plugins(self.base.kind)

    def rows(self, value: tuple[Plugin, ...]) -> Rows:
        for plugin in value:
            yield self.base.kind, section_text(plugin)
            if isinstance(plugin, Method) and len(value) == 1:
                yield "  minimises", plugin.formula_for_parameters()
            elif isinstance(plugin, Method):
                yield "  implements", ", ".join(sorted(implemented_hooks(type(plugin))))
        if not value and self.base is Method:
            yield self.base.kind, "none: members are trained independently"

    def plugins(self, value: tuple[Plugin, ...]) -> Iterator[tuple[str, Plugin]]:
        for index, plugin in enumerate(value):
            if not isinstance(plugin, Unavailable):
                yield self.path if self.single and len(value) == 1 else f"{self.path}.{index}", plugin


@dataclass(frozen=True)
class SectionEntry(Entry):
    """A table of settings; `text` gives the line of an overview."""

    section: type[Section] = Section
    text: Callable[[Any], tuple[str, str]] = lambda section: ("", str(section))
    nested: tuple[str, ...] = ()
    """Keys in its table that have entries of their own."""

    def read(self, reader: Reader, value: Any) -> Section | None:
        table = {} if value is MISSING else reader.table(value, self.path)
        plain = {key: item for key, item in table.items() if key not in self.nested}
        return reader.section(self.section, plain, self.path, self.nested)

    def write(self, value: Section) -> dict[str, Any]:
        return value.to_table()

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        return builder.section(self.section, self.path)

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        return parameters(self.section)

    def rows(self, value: Section) -> Rows:
        yield self.text(value)


@dataclass(frozen=True)
class OptionalSectionEntry(SectionEntry):
    """A table of settings that a spec need not have; None then."""

    def read(self, reader: Reader, value: Any) -> Section | None:
        return None if value is MISSING else super().read(reader, value)

    def write(self, value: Section | None) -> Any:
        return MISSING if value is None else super().write(value)

    def rows(self, value: Section | None) -> Rows:
        if value is not None:
            yield from super().rows(value)


@dataclass(frozen=True)
class ChoiceEntry(Entry):
    """A section that is chosen by name, such as an optimizer."""

    names: Callable[[], Collection[str]] = tuple
    section_of: Callable[[str], type[Section]] = lambda name: Section
    default: str = ""

    def read(self, reader: Reader, value: Any) -> Section | None:
        value = self.default if value is MISSING else value
        return reader.choice(value, self.path, self.names(), self.section_of, self.default)

    def write(self, value: Section) -> dict[str, Any]:
        return value.to_table()

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        sections = ((name, self.section_of(name)) for name in self.names())
        return builder.named(sections, self.path.rpartition(".")[2], self.default)

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        section = self.section_of(name if name in self.names() else self.default)
        return [field for field in parameters(section) if field.name != "name"]

    def choices(self, registry: Registry) -> Collection[str]:
        return self.names()

    def rows(self, value: Section) -> Rows:
        always = {"lr"} & set(type(value).model_fields)
        yield self.path.rpartition(".")[2], section_text(value, always | value.model_fields_set)


@dataclass(frozen=True)
class PluginChoiceEntry(ChoiceEntry):
    """A section that is chosen by name, or a plugin of a kind: an optimizer of torch, or one of a package."""

    base: type[Plugin] = Plugin

    def read(self, reader: Reader, value: Any) -> Section | None:
        value = self.default if value is MISSING else value
        named = reader.named(value, self.path, self.default)
        if named is None:
            return None
        plugin = reader.registry.plugins(self.base.kind).get(named[0])
        if plugin is None:
            names = self.choices(reader.registry)
            return reader.choice(value, self.path, names, self.section_of, self.default)
        if named[0] in self.names():
            kind = self.base.kind
            what = f'two {kind}s are called "{named[0]}": the built-in one and that of {plugin.package}'
            reader.problem(f"{self.path}.name", what, "rename that of the plugin")
            return None
        return reader.plugin(self.base, value, self.path)

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        sections = [(name, self.section_of(name)) for name in self.names()]
        sections += [pair for pair in builder.usable(self.base.kind) if pair[0] not in self.names()]
        return builder.named(sections, self.path.rpartition(".")[2], self.default)

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        plugin = registry.plugins(self.base.kind).get(name)
        return super().fields(registry, name) if plugin is None else plugin_fields(plugin)

    def choices(self, registry: Registry) -> Collection[str]:
        return [*self.names(), *registry.plugins(self.base.kind)]

    def plugins(self, value: Section) -> Iterator[tuple[str, Plugin]]:
        if isinstance(value, Plugin):
            yield self.path, value


@dataclass(frozen=True)
class EnsembleEntry(SectionEntry):
    """The section of the ensemble; groups, or a method's parameters, may imply the number of members."""

    def read(self, reader: Reader, value: Any) -> Section | None:
        section: Any = super().read(reader, value)
        groups, methods = reader.values["groups"], reader.values["methods"]
        implied = [(method.required_members(), f'the parameters of "{method.name}"') for method in methods if method]
        if members := sum(group.members for group in groups if group.role == "member"):
            implied.append((members, "the groups"))
        for needed, reason in implied:
            if section is None or needed is None:
                continue
            if not isinstance(needed, int):
                what = f"{reason} imply {needed!r} members"
                raise PluginError(what, "required_members()", "return an int, or None")
            if "members" not in section.model_fields_set:
                section = self.section.from_table({"members": needed})
            elif section.members != needed:
                what = f"{section.members}, but {reason} imply {needed} members"
                reader.problem("ensemble.members", what, f"set it to {needed}, or leave it out")
        return section


def plugin_fields(info: PluginInfo | None) -> list[Parameter]:
    """Describe the parameters of a plugin; none if there is no plugin or if it is broken."""
    try:
        return parameters(info.load()) if info is not None else []
    except PluginError:
        return []


def section_text(section: Section, shown: Collection[str] | None = None) -> str:
    """Write a named section on one line: its name and its settings, or only the `shown` ones."""
    fields = type(section).model_fields
    keys = None if shown is None else {fields[name].alias or name for name in shown}
    table = section.to_table()
    name = table.pop("name")
    inner = dict(section.inner_plugins()) if isinstance(section, Plugin) else {}
    texts = {key: section_text(inner[key]) if key in inner else toml_value(value) for key, value in table.items()}
    settings = ", ".join(f"{key} = {text}" for key, text in texts.items() if keys is None or key in keys)
    return f"{name} ({settings})" if settings else str(name)
