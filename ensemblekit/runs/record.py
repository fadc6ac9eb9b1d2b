"""run.json: what makes a directory a run. Its format, its status, and the spec that it was begun with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import replace_file
from ensemblekit.runs.json_files import read_json, read_unverified, write_json
from ensemblekit.runs.own_files import RUN, SPEC
from ensemblekit.runs.spec_file import check_spec_unchanged

FORMAT_VERSION = 2
"""Format 1, of version 0.1.0, has checksums of weights and checkpoints only; it is read, and resumed as format 2."""

HOLDS = "the status of the run and the checksum of its spec"


class RunRecord:
    """The content of run.json; empty until the run has begun."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._values = dict(values or {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and verify the record of a run directory; a `RunError` if it is damaged or of a newer format."""
        file = path / RUN
        fix = f"restore the file, or train the spec again: ensemblekit train {path / SPEC} --out …"
        unverified, _ = read_unverified(file, HOLDS, fix)
        _check_format(unverified, file, fix)
        values = read_json(file, HOLDS, fix, checksum_required=unverified["format_version"] > 1)
        spec = values.get("spec")
        if not isinstance(spec, str) or _sha256(spec) != values.get("spec_sha256"):
            raise RunError("damaged: the spec differs from the one that was written", str(file), fix)
        return cls(path, values)

    def begin(self, spec_toml: str) -> None:
        """Write the record of a new run."""
        values = {
            "format_version": FORMAT_VERSION,
            "created": _now(),
            "status": "running",
            "spec_sha256": _sha256(spec_toml),
            "spec": spec_toml,
        }
        write_json(self.path / RUN, values)
        self._values = values

    def write(self, **changes: Any) -> None:
        """Change values; from then on the run has the newest format."""
        self._values |= {"format_version": FORMAT_VERSION, "updated": _now(), **changes}
        write_json(self.path / RUN, self._values)

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def format_version(self) -> int:
        """The format of all files of the run."""
        return int(self._values.get("format_version", FORMAT_VERSION))

    @property
    def has_checksums(self) -> bool:
        """Whether every file of the run has a checksum."""
        return self.format_version > 1

    @property
    def created(self) -> str:
        """When the run was begun, in ISO format."""
        return str(self._values.get("created", ""))

    @property
    def status(self) -> str:
        """How the run ended, as far as it could say so itself."""
        return str(self._values.get("status", ""))

    @property
    def error(self) -> str | None:
        """Why the run failed."""
        error = self._values.get("error")
        return error if isinstance(error, str) else None

    @property
    def notices(self) -> list[str]:
        """What a user should know about the run although it is no error."""
        notices = self._values.get("notices")
        return [str(text) for text in notices] if isinstance(notices, list) else []

    def write_status(self, status: str, error: str | None, notices: Sequence[str] | None) -> None:
        """Record how the run goes or how it ended; `notices` replace those that were recorded before."""
        self.write(status=status, error=error, notices=self.notices if notices is None else list(notices))

    @property
    def spec(self) -> str:
        """The text of spec.toml when the run was begun."""
        return str(self._values["spec"])

    def check_spec_unchanged(self) -> None:
        """Raise a `RunError` that names every key of spec.toml whose value differs from when the run was begun."""
        check_spec_unchanged(self.path / SPEC, self.spec)

    def change_spec(self, spec_toml: str, continued_from: int) -> None:
        """Let the run go on after an epoch with another spec; after a crash in between, `restore_spec` completes it."""
        self.write(
            status="interrupted",
            previous_spec=self.spec,
            spec=spec_toml,
            spec_sha256=_sha256(spec_toml),
            continued_from=continued_from,
        )
        replace_file(self.path / SPEC, spec_toml.encode())

    @property
    def continued_from(self) -> int | None:
        """The epoch after which the run goes on although it was to end there; None if there is none."""
        epoch = self._values.get("continued_from")
        return epoch if isinstance(epoch, int) else None

    def restore_spec(self) -> str | None:
        """Write spec.toml again if it is missing, or if `change_spec` was killed before it did; returns what was."""
        file = self.path / SPEC
        missing = not os.path.lexists(file)
        previous = self._values.get("previous_spec")
        if missing or (isinstance(previous, str) and file.read_bytes() == previous.encode()):
            replace_file(file, self.spec.encode())
        return f"{SPEC} was missing and was written again" if missing else None


def _check_format(record: Mapping[str, Any], file: Path, fix: str) -> None:
    version = record.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise RunError("damaged: the format version is missing", str(file), fix)
    if version > FORMAT_VERSION:
        what = f"written by a newer version (format {version}; this version reads up to {FORMAT_VERSION})"
        raise RunError(what, str(file), "upgrade ensemblekit")
    if version < 1:
        raise RunError(f"damaged: format {version} does not exist", str(file), fix)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
