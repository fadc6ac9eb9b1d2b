"""The contract of every plugin: it is documented, a spec can describe it, and its hooks exist."""

from __future__ import annotations

import tomllib
from typing import Generic

import tomli_w

from ensemblekit.core.errors import PluginError
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.parameters import parameters
from ensemblekit.core.verification import verify_hooks
from ensemblekit.spec.reader import build_plugin
from ensemblekit.testing.checks import Contract, P, check
from ensemblekit.testing.toy_run import toy_registry


class PluginContract(Contract[P], Generic[P]):
    """The checks that plugins of all kinds share."""

    @check("its description is one sentence")
    def description(self) -> None:
        """`list` and `inspect` print the first line of the docstring."""
        first = (self.plugin_class.__doc__ or "").strip().partition("\n")[0]
        if not first.endswith(".") or len(first.split()) < 2:
            raise self.violation(
                "a docstring whose first line is a sentence that ends with a full stop",
                f'"{first}"' if first else "no docstring",
                fix="say in one line what the plugin does; `ensemblekit list` prints that line",
            )

    @check("every parameter is described")
    def parameter_descriptions(self) -> None:
        """`inspect`, the schema and error messages show the description of a parameter."""
        bare = [parameter.name for parameter in parameters(self.plugin_class) if not parameter.description.strip()]
        if bare:
            raise self.violation(
                "a description for every parameter",
                f"no description for {', '.join(bare)}",
                fix=f'write {bare[0]}: … = Field(…, description="…")',
            )

    @check("it round-trips through a spec")
    def spec_round_trip(self) -> None:
        """A run writes its spec and reads it back when it is resumed."""
        table = self.plugin.to_table()
        read = dict(tomllib.loads(tomli_w.dumps(table)))
        name = read.pop("name", None)
        if name != self.plugin.name:
            got = "no name" if name is None else f'the name "{name}"'
            raise self.violation(f'a table with name = "{self.plugin.name}"', got, "to_table")
        registry = toy_registry(self.plugin)
        restored = build_plugin(KINDS[self.plugin.kind].base_class, {"name": name, **read}, registry)
        if restored.model_dump() != self.plugin.model_dump() or restored.to_table() != table:
            raise self.violation(
                f"an equal plugin when its table is written as TOML and read back: {self.plugin!r}",
                repr(restored),
                fix="let validators accept what to_table() writes, and leave it unchanged",
            )

    @check("its hooks exist and take only known arguments")
    def known_hooks(self) -> None:
        """A misspelt hook would never be called."""
        try:
            verify_hooks(self.plugin_class, self.plugin.name)
        except PluginError as error:
            expected = "hooks and arguments that are listed in ensemblekit.core.hookspecs"
            raise self.violation(expected, error.what, fix=error.fix) from None

    @property
    def hooks_are_known(self) -> bool:
        """Whether the plugin's hooks can be registered; if not, none of them can be called."""
        try:
            verify_hooks(self.plugin_class, self.plugin.name)
        except PluginError:
            return False
        return True
