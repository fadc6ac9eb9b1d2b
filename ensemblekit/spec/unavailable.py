"""A part of a run's spec that only training needs and that cannot be read here, such as that of a missing plugin."""

from __future__ import annotations

from typing import Any, Self

from pydantic import PrivateAttr

from ensemblekit.core.plugin import Section


class Unavailable(Section):
    """The table as it was written; nothing can be trained with it."""

    _table: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Keep a table, or a name alone."""
        section = cls()
        section._table = {"name": value} if isinstance(value, str) else dict(value)
        return section

    @property
    def name(self) -> str:
        """The name that it is chosen by; empty if it has none."""
        return str(self._table.get("name", ""))

    def to_table(self) -> dict[str, Any]:
        """Return the table as it was written."""
        return dict(self._table)
