"""What holds for plugins of every kind: they are described, and a spec can say exactly what they are."""

from __future__ import annotations

import tomllib
from functools import partial

import tomli_w

from ensemblekit.core.errors import PluginError
from ensemblekit.core.hooks import verify_hooks
from ensemblekit.core.parameters import parameters
from ensemblekit.core.plugin import Plugin
from ensemblekit.testing.checks import Check, ContractError, look_at

HOOKS_ARE_KNOWN = "hooks exist and name only known arguments"


def common_checks(plugin: Plugin) -> list[Check]:
    """The checks of any plugin."""
    claims = {
        "its description is one sentence": description,
        "every parameter is described": parameter_descriptions,
        "a spec says exactly what it is": spec_round_trip,
        HOOKS_ARE_KNOWN: known_hooks,
    }
    return [Check(name, plugin, partial(function, plugin)) for name, function in claims.items()]


def description(plugin: Plugin) -> None:
    """`list` and `inspect` print the docstring's first line."""
    cls = type(plugin)
    first = (cls.__doc__ or "").strip().partition("\n")[0]
    if not first.endswith(".") or len(first.split()) < 2:
        raise ContractError(
            "a docstring whose first line is a sentence, with its full stop on that line",
            f'"{first}"' if first else "no docstring",
            look_at(cls),
            "`ensemblekit list` prints that line: say there what the plugin does",
        )


def parameter_descriptions(plugin: Plugin) -> None:
    """`inspect`, the schema and error messages tell what each parameter is for."""
    cls = type(plugin)
    bare = [parameter.name for parameter in parameters(cls) if not parameter.description.strip()]
    if bare:
        raise ContractError(
            "a description of every parameter",
            f"none of {', '.join(bare)}",
            look_at(cls),
            f'write {bare[0]}: … = Field(…, description="…")',
        )


def spec_round_trip(plugin: Plugin) -> None:
    """What is written to a run's spec must be read back as the same plugin."""
    cls = type(plugin)
    table = plugin.to_table()
    text = tomli_w.dumps(table)
    read = dict(tomllib.loads(text))
    name = read.pop("name", None)
    if name != plugin.name:
        got = "no name" if name is None else f'the name "{name}"'
        raise ContractError(f'a table with name = "{plugin.name}"', got, look_at(cls, "to_table"))
    again = cls.from_table(read).named(plugin.name)
    if again.model_dump() != plugin.model_dump() or again.to_table() != table:
        raise ContractError(
            f"the plugin that its own table describes, read back from TOML: {plugin!r}",
            repr(again),
            look_at(cls),
            "let validators accept what to_table() writes and leave it as it is",
        )


def known_hooks(plugin: Plugin) -> None:
    """A misspelt hook would never be called."""
    try:
        verify_hooks(type(plugin), plugin.name)
    except PluginError as error:
        what = error.what.partition(": ")[2] or error.what
        raise ContractError("hooks as in ensemblekit.core.hookspecs", what, look_at(type(plugin)), error.fix) from None


def hooks_are_known(plugin: Plugin) -> bool:
    """Whether the plugin can be registered at all; nothing else about its hooks can be asked if not."""
    try:
        verify_hooks(type(plugin), plugin.name)
    except PluginError:
        return False
    return True
