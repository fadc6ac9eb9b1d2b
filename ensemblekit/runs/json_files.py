"""JSON files of a run directory, each with a checksum of its own content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import replace_file
from ensemblekit.runs.sealing import KEY, encoded, is_intact, sealed, unsealed

_MALFORMED = (KeyError, TypeError, IndexError, AttributeError, ValueError, ArithmeticError, RecursionError)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object with its checksum, atomically."""
    replace_file(path, encoded(sealed(value)))


def read_json(path: Path, holds: str, fix: str = "restore the file", checksum_required: bool = True) -> dict[str, Any]:
    """Read and verify an object; its checksum is left out.

    Args:
        path: the file.
        holds: what the file holds, so that the error says what its damage affects.
        fix: how to repair the damage.
        checksum_required: False for files of format 1, which may have no checksum.

    Raises:
        RunError: the file is missing or damaged.
    """
    value, content = read_unverified(path, holds, fix)
    if checksum_required or KEY in value:
        try:
            intact = is_intact(value) and content == encoded(value)
        except (ValueError, TypeError, RecursionError):
            intact = False
        if not intact:
            raise _damaged("checksum mismatch", path, holds, fix)
    return unsealed(value)


def read_unverified(path: Path, holds: str, fix: str) -> tuple[dict[str, Any], bytes]:
    """Read an object as it is, and the bytes of the file; a `RunError` if there is none."""
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except FileNotFoundError as error:
        raise RunError(f"{path.name} is missing: it holds {holds}", str(path), fix, path=str(path)) from error
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(path), fix, path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged("not JSON", path, holds, fix) from error
    if not isinstance(value, dict):
        raise _damaged("not a JSON object", path, holds, fix)
    return value, content


@contextmanager
def as_written(file: Path) -> Iterator[None]:
    """Raise a `RunError` if the content of a file does not have the structure in which runs write it."""
    try:
        yield
    except _MALFORMED as error:
        what = f"damaged: unexpected structure ({type(error).__name__}: {error})"
        raise RunError(what, str(file), "restore the file", path=str(file)) from error


def _damaged(reason: str, path: Path, holds: str, fix: str) -> RunError:
    return RunError(f"damaged: {reason}; {path.name} holds {holds}", str(path), fix, path=str(path))
