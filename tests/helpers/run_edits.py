"""Edits of a run's files with the checksums made to fit, as somebody would who forges a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemblekit.runs.json_files import write_json


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the object in a file, and its checksum."""
    value = json.loads(file.read_text())
    change(value)
    write_json(file, value)


def edit_spec(run: Path, old: str, new: str) -> None:
    """Change the spec of a run wherever it is kept."""
    text = (run / "spec.toml").read_text()
    assert old in text
    changed = text.replace(old, new)
    (run / "spec.toml").write_text(changed)
    sha256 = hashlib.sha256(changed.encode()).hexdigest()
    edit_json(run / "run.json", lambda record: record.update(spec=changed, spec_sha256=sha256))
