"""The kinds of files that a figure can be written to; known without importing matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import UsageError

FORMATS: Mapping[str, Mapping[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Each with the metadata that would change from one call to the next."""


def check_figure_file(path: Path) -> None:
    """Raise a `UsageError` unless a figure can be written to a file of this name."""
    if path.suffix.lower() not in FORMATS:
        fix = f"name a file that ends in {', '.join(FORMATS)}"
        raise UsageError("not a kind of file that figures are written to", str(path), fix)
