"""Groups of members with settings of their own, and of auxiliary networks: how a spec has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from ensemblekit.core.parameters import Parameter, parameters, short
from ensemblekit.core.plugin import Model, Plugin, Section
from ensemblekit.core.registry import Registry
from ensemblekit.spec.entries import MISSING, Entry, Rows, section_text
from ensemblekit.spec.reading import Reader

if TYPE_CHECKING:
    from ensemblekit.spec.schema import SchemaBuilder


class GroupSection(Section):
    """Some members that differ from the others, or auxiliary networks."""

    members: int = Field(1, ge=1, le=10_000, description="number of members, or of auxiliary networks")
    name: str = Field("", pattern=r"^\w*$", description="name of the group, by which hooks find auxiliary outputs")
    role: Literal["member", "auxiliary"] = Field(
        "member", description="members predict; auxiliary networks, such as a gate, are given to the hooks of a method"
    )
    outputs: int | None = Field(
        None, ge=1, description="outputs of each auxiliary network (default: the number of members)"
    )

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role == "member" and self.outputs is not None:
            raise ValueError('outputs is only for groups with role = "auxiliary": members have those of the task')
        if self.role == "auxiliary" and not self.name:
            raise ValueError('a group with role = "auxiliary" needs a name')
        return self


@dataclass(frozen=True)
class Group:
    """Some members that share a model of their own, or auxiliary networks."""

    members: int
    model: Model
    name: str = ""
    role: Literal["member", "auxiliary"] = "member"
    outputs: int | None = None
    """Outputs of each auxiliary network; None: as many as there are members."""
    optimizer: Any = None
    """The optimizer of this group; None: that of the spec."""
    loss: Any = None
    """The loss of this group's members; None: that of the spec."""


@dataclass(frozen=True)
class GroupsEntry(Entry):
    """Groups of members: tables `model`, `optimizer` and `loss` change keys of the spec's own, or name another."""

    section: type[GroupSection] = GroupSection
    optimizer: Entry | None = None
    loss: Entry | None = None

    def read(self, reader: Reader, value: Any) -> tuple[Group, ...]:
        if value is MISSING:
            return ()
        if not isinstance(value, list | tuple):
            reader.problem(self.path, f"{short(value)} is not a list of tables", f"write [[{self.path}]] for each")
            return ()
        groups = [self._read_group(reader, item, f"{self.path}.{index}") for index, item in enumerate(value)]
        return tuple(group for group in groups if group is not None)

    def _read_group(self, reader: Reader, item: Any, path: str) -> Group | None:
        table = reader.table(item, path)
        changes = reader.table(table.pop("model", {}), f"{path}.model")
        model = reader.plugin(Model, _changed(reader.tables.get("model", {}), changes), f"{path}.model")
        others = {key: table.pop(key) for key in ("optimizer", "loss") if key in table}
        section = reader.section(self.section, table, path, ("model", "optimizer", "loss"))
        read = {key: self._read_changes(reader, key, value, path) for key, value in others.items()}
        if section is None or model is None:
            return None
        return Group(section.members, model, section.name, section.role, section.outputs, **read)

    def _read_changes(self, reader: Reader, key: str, value: Any, path: str) -> Any:
        """Read the optimizer or the loss of a group: keys of the spec's own that differ."""
        entry: Entry = getattr(self, key)
        training = reader.tables.get("training", {})
        base = training.get(key, {}) if isinstance(training, Mapping) else {}
        changes = reader.table(value, f"{path}.{key}")
        return replace(entry, path=f"{path}.{key}").read(reader, _changed(base, changes))

    def write(self, value: tuple[Group, ...]) -> Any:
        return [self._write_group(group) for group in value] or MISSING

    def _write_group(self, group: Group) -> dict[str, Any]:
        table: dict[str, Any] = {"members": group.members, "model": group.model.to_table()}
        for key, default in (("name", ""), ("role", "member"), ("outputs", None)):
            if getattr(group, key) != default:
                table[key] = getattr(group, key)
        return table | {
            key: getattr(group, key).to_table() for key in ("optimizer", "loss") if getattr(group, key) is not None
        }

    def schema(self, builder: SchemaBuilder) -> dict[str, Any]:
        own = builder.section(self.section, self.path)["properties"]
        part = {"type": "object"}  # a part of a table is enough
        properties = {**own, "model": part, "optimizer": part, "loss": part}
        return {"type": "array", "items": {"type": "object", "properties": properties, "additionalProperties": False}}

    def fields(self, registry: Registry, name: str = "") -> list[Parameter]:
        tables = {"model": "[model]", "optimizer": "[training.optimizer]", "loss": "[training.loss]"}
        changes = [
            Parameter(key, "table", None, False, f"keys of {table}", f"the keys of {table} that differ")
            for key, table in tables.items()
        ]
        return [*parameters(self.section), *changes]

    def rows(self, value: tuple[Group, ...]) -> Rows:
        for group in value:
            label = "group" if group.role == "member" else "auxiliary"
            own = "".join(
                f", {key} {section_text(part, part.model_fields_set)}"
                for key, part in (("optimizer", group.optimizer), ("loss", group.loss))
                if part is not None
            )
            named = f"{group.name}: " if group.name else ""
            yield label, f"{named}{group.members} × {section_text(group.model)}{own}"

    def plugins(self, value: tuple[Group, ...]) -> Iterator[tuple[str, Plugin]]:
        for index, group in enumerate(value):
            for key in ("model", "optimizer", "loss"):
                if isinstance(plugin := getattr(group, key), Plugin):
                    yield f"{self.path}.{index}.{key}", plugin


def _changed(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with some keys changed; the changes alone if they name something else."""
    table = {"name": base} if isinstance(base, str) else dict(base) if isinstance(base, Mapping) else {}
    return dict(changes) if changes.get("name", table.get("name")) != table.get("name") else {**table, **changes}
