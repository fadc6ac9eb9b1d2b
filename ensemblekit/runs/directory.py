"""The run directory: spec, environment, metrics, checkpoints, model and result, each safe from a crash at any moment.

Only the process that holds `lock()` writes; anybody may read at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import (
    json_bytes,
    read_json,
    replace_file,
    replacing,
    sweep,
    write_all,
    write_bytes,
    write_errors,
)
from ensemblekit.runs.checkpoints import Checkpoint, Checkpoints
from ensemblekit.runs.locking import locked
from ensemblekit.runs.tensor_files import read_tensors, sha256_of, write_tensors

__all__ = ["FORMAT_VERSION", "MIGRATIONS", "Checkpoint", "RunDirectory"]

FORMAT_VERSION = 1
# For each older format, what turns its run.json into that of the next one; the file itself is left as it is.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_RUN, _SPEC, _ENVIRONMENT, _METRICS = "run.json", "spec.toml", "environment.json", "metrics.jsonl"
_WEIGHTS, _MODEL, _RESULT, _CHECKPOINTS, _LOCK = (
    "model.safetensors",
    "model.json",
    "result.json",
    "checkpoints",
    ".lock",
)


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path, original_spec: str) -> None:
        self.path = path
        self._original_spec = original_spec
        self._checkpoints = Checkpoints(path / _CHECKPOINTS)

    @staticmethod
    def refuse_if_used(path: str | Path) -> None:
        """`RunError` if something is there, or nothing can be: this shows before anything is computed."""
        path = Path(path)
        _refuse_if_used(path)
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            raise RunError("cannot write", str(path), f"choose another --out, or make {there} writable")

    @classmethod
    def create(cls, path: str | Path, spec_toml: str, environment: Mapping[str, Any]) -> RunDirectory:
        """Start a run in a directory that is empty or not there yet; `RunError` if it is neither or not writable."""
        path = Path(path)
        _refuse_if_used(path)
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        content = spec_toml.encode()
        record = {
            "format_version": FORMAT_VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "spec_sha256": hashlib.sha256(content).hexdigest(),
            "spec": spec_toml,
        }
        with locked(path / _LOCK):
            _refuse_if_used(path)  # another process may have been faster
            try:
                with write_errors(path):
                    (path / _CHECKPOINTS).mkdir()
                replace_file(path / _SPEC, content)
                replace_file(path / _ENVIRONMENT, json_bytes(environment))
                replace_file(path / _RUN, json_bytes(record))  # last: with it the directory is a run
            except BaseException:
                _remove_all_but_the_lock(path)
                raise
        return cls(path, spec_toml)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run; `RunError` if there is none, or one that this version cannot read."""
        path = Path(path)
        file = path / _RUN
        if not os.path.isfile(file):
            raise RunError("no run here", str(path), "give the directory that `ensemblekit train` wrote")
        record = _migrated(read_json(file), file)
        spec = record.get("spec")
        if not isinstance(spec, str) or _sha256(spec) != record.get("spec_sha256"):
            raise RunError("damaged: the spec is not as it was written", str(file), "restore the file")
        return cls(path, spec)

    def lock(self) -> AbstractContextManager[None]:
        """Keep the run for this process; `RunError` with the owner's pid if a living process has it."""
        return locked(self.path / _LOCK)

    @property
    def spec_text(self) -> str:
        """The text of spec.toml as it is now; see `check_spec_unchanged`."""
        file = self.path / _SPEC
        try:
            return file.read_bytes().decode()
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(file), "restore the file") from error
        except UnicodeDecodeError as error:
            raise RunError(f"not UTF-8 text: byte {error.start}", str(file), "restore the file") from error

    def check_spec_unchanged(self) -> None:
        """`RunError` with every key of spec.toml that no longer has the value the run was started with."""
        text, file = self.spec_text, str(self.path / _SPEC)
        if text == self._original_spec:
            return
        fix = f"undo the change, or start another run: ensemblekit train {file} --out …"
        try:
            old, new = (_leaves(tomllib.loads(spec), "") for spec in (self._original_spec, text))
        except (ValueError, RecursionError) as error:
            raise RunError(f"the spec was changed and is not TOML any more: {error}", file, fix) from error
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if keys:
            changes = ", ".join(f"{key}: {old.get(key, 'not set')} → {new.get(key, 'not set')}" for key in keys)
            raise RunError(f"the spec was changed: {changes}", file, fix)

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was started with and on."""
        return read_json(self.path / _ENVIRONMENT)

    def update_environment(self, **changes: Any) -> None:
        """Add to the environment, or replace parts of it."""
        replace_file(self.path / _ENVIRONMENT, json_bytes({**self.environment, **changes}))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one epoch's row; when it returns the row is on the disk, when it fails no part of it is."""
        file = self.path / _METRICS
        content = json_bytes(row, indent=None)
        with write_errors(file):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                end = _end_of_last_line(descriptor)
                os.ftruncate(descriptor, end)
                try:
                    write_all(descriptor, content)
                except BaseException:
                    os.ftruncate(descriptor, end)
                    raise
            finally:
                os.close(descriptor)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows, oldest first; a last line that was cut off does not count."""
        file = self.path / _METRICS
        try:
            lines = file.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(file), "restore the file") from error
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise RunError(f"damaged: line {number} is not a row", str(file), "restore or delete the line")
            rows.append(row)
        return rows

    def truncate_metrics(self, epoch: int) -> None:
        """Drop every row that is not of this epoch or an earlier one."""
        rows = [row for row in self.read_metrics() if isinstance(row.get("epoch"), int) and row["epoch"] <= epoch]
        replace_file(self.path / _METRICS, b"".join(json_bytes(row, indent=None) for row in rows))

    def save_checkpoint(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Commit a checkpoint; the last two and the best are kept."""
        self._checkpoints.save(checkpoint, best)
        sweep(self.path)

    def load_checkpoint(self, best: bool = False) -> Checkpoint:
        """The newest checkpoint, or the best, that is as it was written; a damaged one is warned about and passed over.

        With `best` and none marked as best it is the newest.
        """
        return self._checkpoints.load(best)

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Store the finished model; until both files are in place there is none."""
        mark = self.path / _MODEL
        with replacing(self.path / _WEIGHTS, mark) as (weights_file, model_file):
            sha256 = write_tensors(weights_file, tensors)
            write_bytes(model_file, json_bytes({"sha256": sha256, "metadata": metadata}))
            mark.unlink(missing_ok=True)  # it would vouch for weights that it does not describe

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The finished model's tensors and metadata, verified; `RunError` if there is none or it is damaged."""
        weights, mark = self.path / _WEIGHTS, self.path / _MODEL
        if not os.path.isfile(weights) or not os.path.isfile(mark):
            raise RunError("the run has not finished", str(self.path), f"ensemblekit resume {self.path}")
        record = read_json(mark)
        metadata = record.get("metadata")
        if not isinstance(metadata, dict):
            raise RunError("damaged: no metadata", str(mark), "restore the file")
        try:
            intact = sha256_of(weights) == record.get("sha256")
            tensors = read_tensors(weights)
        except SafetensorError as error:
            what = "refused: not a safetensors file" + ("" if intact else " (checksum mismatch)")
            raise RunError(what, str(weights), "restore the file; nothing else is ever loaded") from error
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(weights), "restore the file") from error
        if not intact:
            raise RunError("checksum mismatch", str(weights), "restore the file")
        return tensors, metadata

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Store what the run has come to."""
        replace_file(self.path / _RESULT, json_bytes(result))

    def read_result(self) -> dict[str, Any] | None:
        """What the run has come to, or None if it has not finished."""
        file = self.path / _RESULT
        return read_json(file) if os.path.lexists(file) else None


def _refuse_if_used(path: Path) -> None:
    if not os.path.lexists(path):
        return
    with write_errors(path):
        if path.is_dir() and set(os.listdir(path)) <= {_LOCK}:
            return
    if os.path.lexists(path / _RUN):
        raise RunError("there is a run already", str(path), f"ensemblekit resume {path}, or choose another --out")
    what = "the directory is not empty" if path.is_dir() else "not a directory"
    raise RunError(what, str(path), "choose another --out")


def _remove_all_but_the_lock(path: Path) -> None:
    """Leave a directory that counts as empty."""
    for name in (_RUN, _ENVIRONMENT, _SPEC):
        with suppress(OSError):
            (path / name).unlink()
    with suppress(OSError):
        (path / _CHECKPOINTS).rmdir()


def _migrated(record: dict[str, Any], file: Path) -> dict[str, Any]:
    version = record.get("format_version")
    if not isinstance(version, int):
        raise RunError("damaged: no format version", str(file), "restore the file")
    if version > FORMAT_VERSION:
        what = f"written by a newer version (format {version}, this one reads up to {FORMAT_VERSION})"
        raise RunError(what, str(file), "upgrade ensemblekit")
    while version != FORMAT_VERSION:
        if version not in MIGRATIONS:
            raise RunError(f"damaged: there is no format {version}", str(file), "restore the file")
        record, version = MIGRATIONS[version](record), version + 1
    return record


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _leaves(value: Any, key: str) -> dict[str, str]:
    """Dotted keys of all values that are no tables or lists themselves, each value as text, so that 1 is not 1.0."""
    if isinstance(value, dict | list) and (value or not key):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, item in items for k, v in _leaves(item, f"{key}.{name}".lstrip(".")).items()}
    return {key: repr(value)}


def _end_of_last_line(descriptor: int) -> int:
    """Where the last whole line of a file ends, in bytes."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    return os.pread(descriptor, size, 0).rfind(b"\n") + 1
