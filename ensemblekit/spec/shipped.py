"""The specs that come with the package: found by name, listed with their purpose.

They are the files of `specs/` at the top of the repository, which `shipped_specs` here is a link to; a wheel has
copies of them in its place. Nothing slow is imported, since shell completion asks for the names.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import Problem, SpecError, did_you_mean


def shipped_specs() -> dict[str, Path]:
    """The shipped specs by name: `digits`, and with its folder `cifar100/gncl`."""
    root = Path(str(files(__package__))) / "shipped_specs"
    paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.glob("**/*.toml")}
    return dict(sorted(paths.items(), key=lambda item: ("/" in item[0], item[0])))


def find_spec(spec: str | Path) -> Path:
    """Find the file of a spec.

    Args:
        spec: The path of a TOML file or, where there is no such file, the name of a shipped spec.

    Returns:
        The path of the file.

    Raises:
        SpecError: There is neither a file nor a shipped spec of this name.
    """
    path = Path(spec)
    if path.exists():
        return path
    known = shipped_specs()
    name = path.as_posix()
    if name in known:
        return known[name]
    near = did_you_mean(name.removeprefix("specs/").removesuffix(".toml"), known)
    fix = f"{near} ensemblekit specs lists the shipped specs".strip()
    raise SpecError([Problem("", "neither a file nor a shipped spec", fix)], name)


def describe_spec(path: Path) -> dict[str, Any]:
    """Describe a spec in plain values: its purpose (the first comment line), and the names of its plugins."""
    text = path.read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    methods = tables.get("method", [])
    return {
        "purpose": text.partition("\n")[0].removeprefix("#").strip(),
        "data": plugin_name(tables.get("data", "")),
        "method": ", ".join(plugin_name(method) for method in (methods if isinstance(methods, list) else [methods])),
        "model": plugin_name(tables.get("model", "")),
    }


def plugin_name(section: Any) -> str:
    """The name of the plugin that a section selects; a plugin without settings may be written as its name alone."""
    return str(section.get("name", "")) if isinstance(section, dict) else str(section)
