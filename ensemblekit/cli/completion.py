"""Shell completion: the names and keys that click offers when a person presses Tab.

Click calls these functions with the command line so far. They read entry points and source files and import neither
torch nor pydantic. An error while completing is not shown; there are only no suggestions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ensemblekit.core.errors import EnsemblekitError


def complete_spec(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped specs by name, and files."""
    return [*complete_shipped_spec(ctx, param, incomplete), CompletionItem(incomplete, type="file")]


def complete_shipped_spec(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped specs by name, with their purpose."""
    from ensemblekit.spec.shipped import describe_spec, shipped_specs

    return [
        CompletionItem(name, help=describe_spec(path)["purpose"])
        for name, path in shipped_specs().items()
        if name.startswith(incomplete)
    ]


def complete_directory(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Directories."""
    return [CompletionItem(incomplete, type="dir")]


def complete_plugin(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed plugins by name, or by KIND:NAME once a colon is there."""
    from ensemblekit.core.registry import discover

    kind = ctx.params.get("kind")
    plugins = [info for info in discover() if kind in (None, info.kind)]
    names = {(f"{info.kind}:{info.name}" if ":" in incomplete else info.name): info.kind for info in plugins}
    return [CompletionItem(name, help=of_kind) for name, of_kind in names.items() if name.startswith(incomplete)]


def complete_page(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed plugins, and sections of a spec."""
    from ensemblekit.spec.keys import SECTIONS

    sections = [] if ctx.params.get("kind") else _matching(SECTIONS, incomplete, "section")
    return [*complete_plugin(ctx, param, incomplete), *sections]


def complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed plugins, packages with plugins, and Python files."""
    from ensemblekit.core.registry import discover

    packages = _matching({info.package for info in discover()}, incomplete, "package")
    return [*complete_plugin(ctx, param, incomplete), *packages, CompletionItem(incomplete, type="file")]


def complete_dataset(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed data sets by name."""
    from ensemblekit.core.registry import discover

    return _matching(discover().plugins("dataset"), incomplete)


def complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of a spec for --set, with the parameters of the plugins that the spec on the command line names."""
    from ensemblekit.core.registry import discover
    from ensemblekit.spec.keys import spec_keys

    keys = spec_keys(_tables(_argument(ctx, "spec_file")), discover())
    return _matching((f"{key}=" for key in keys), incomplete)


def complete_parameter(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Parameters of the plugin that is checked."""
    from ensemblekit.core.lookup import find_plugin
    from ensemblekit.core.registry import discover
    from ensemblekit.spec.keys import field_names

    try:
        plugin = find_plugin(_argument(ctx, "target"), discover(), ctx.params.get("kind"))
    except EnsemblekitError:
        return []
    return _matching((f"{key}=" for key in field_names(plugin.target)), incomplete) if plugin else []


def complete_workload(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Workloads of the benchmark by name."""
    from importlib.resources import files

    text = files("ensemblekit.bench").joinpath("workloads.toml").read_text(encoding="utf-8")
    return _matching(tomllib.loads(text), incomplete)


def complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Kinds of device."""
    return _matching(("auto", "cpu", "cuda", "mps"), incomplete)


def _matching(names: Iterable[str], incomplete: str, about: str | None = None) -> list[CompletionItem]:
    return [CompletionItem(name, help=about) for name in names if name.startswith(incomplete)]


def _argument(ctx: click.Context, name: str) -> str:
    """The argument that stands before the option that is completed; "" if there is none yet."""
    # Click stops parsing at an option without its value, and leaves the arguments before it unparsed in `ctx.args`.
    return str(ctx.params.get(name) or next(iter(ctx.args), ""))


def _tables(spec: str) -> Mapping[str, Any]:
    """The tables of the spec on the command line; none if there is no spec yet or it cannot be read."""
    from ensemblekit.spec.shipped import find_spec

    try:
        return tomllib.loads(find_spec(spec).read_text(encoding="utf-8")) if spec else {}
    except (EnsemblekitError, OSError, ValueError):
        return {}
