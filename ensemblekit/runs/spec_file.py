"""spec.toml of a run: which of its values differ from those that the run was begun with."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError


def check_spec_unchanged(file: Path, original: str) -> None:
    """Raise a `RunError` that names every key of a spec whose value is not the original one; layout may differ."""
    restore = f"delete it and have it written again: ensemblekit resume {file.parent}"
    try:
        text = file.read_bytes().decode()
    except FileNotFoundError as error:
        fix = f"have it written again: ensemblekit resume {file.parent}"
        raise RunError(f"{file.name} is missing", str(file), fix, path=str(file)) from error
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(file), restore, path=str(file)) from error
    except UnicodeDecodeError as error:
        raise RunError(f"not UTF-8 text: byte {error.start}", str(file), restore, path=str(file)) from error
    if text == original:
        return
    fix = f"undo the change (run.json has the original), or start another run: ensemblekit train {file} --out …"
    try:
        old, new = (_leaves(tomllib.loads(spec), "") for spec in (original, text))
    except (ValueError, RecursionError) as error:
        what = f"the spec was changed and is no longer valid TOML: {error}"
        raise RunError(what, str(file), fix, path=str(file)) from error
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if keys:
        changes = ", ".join(f"{key}: {old.get(key, 'not set')} → {new.get(key, 'not set')}" for key in keys)
        raise RunError(f"the spec was changed: {changes}", str(file), fix, path=str(file))


def _leaves(value: Any, key: str) -> dict[str, str]:
    """Return all plain values by dotted key, each as text, so that 1 differs from 1.0."""
    if isinstance(value, dict | list) and (value or not key):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, item in items for k, v in _leaves(item, f"{key}.{name}".lstrip(".")).items()}
    return {key: repr(value)}
