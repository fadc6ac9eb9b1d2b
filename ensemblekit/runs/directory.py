"""The run directory: spec, environment, metrics, checkpoints, model and result, safe from a crash at any moment.

Only the process that holds the lock writes; anybody may read at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
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
from ensemblekit.runs.locking import is_locked, locked
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.tensor_files import read_tensors, sha256_of, write_tensors

FORMAT_VERSION = 1

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

    def __init__(self, path: Path, record: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._record: dict[str, Any] = dict(record or {})
        """The content of run.json; empty until `begin`."""
        self._checkpoints = Checkpoints(path / _CHECKPOINTS)

    @classmethod
    @contextmanager
    def claim(cls, path: str | Path, is_new: bool = False) -> Iterator[RunDirectory]:
        """Reserve and lock a directory for a new run; call `begin` in the block, else nothing is left behind.

        Args:
            path: a directory that is empty or does not exist.
            is_new: whether an existing directory was made for this run only.

        Raises:
            RunError: the directory is not empty, not writable, or in use by another process.
        """
        path = Path(path)
        _check_unused(path)
        existed = path.exists() and not is_new
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        with locked(path / _LOCK):
            _check_unused(path)  # another process may have been faster
            try:
                yield directory
            finally:
                if not directory._record:
                    directory._remove_leftovers(keep_directory=existed)

    @classmethod
    @contextmanager
    def claim_next(cls, name: str) -> Iterator[RunDirectory]:
        """Claim runs/NAME-NUMBER with the first free number; runs that start together get different ones."""
        for number in count(1):
            path = Path("runs", f"{name}-{number}")
            with write_errors(path), suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        with cls.claim(path, is_new=True) as directory:
            yield directory

    @classmethod
    def create(cls, path: str | Path, spec_toml: str, environment: Mapping[str, Any]) -> RunDirectory:
        """Begin a run in a new directory without keeping its lock."""
        with cls.claim(path) as directory:
            directory.begin(spec_toml, environment)
        return directory

    def begin(self, spec_toml: str, environment: Mapping[str, Any]) -> None:
        """Write the files that make the directory a run."""
        content = spec_toml.encode()
        record = {
            "format_version": FORMAT_VERSION,
            "created": _now(),
            "status": "running",
            "spec_sha256": hashlib.sha256(content).hexdigest(),
            "spec": spec_toml,
        }
        with write_errors(self.path):
            (self.path / _CHECKPOINTS).mkdir()
        replace_file(self.path / _SPEC, content)
        replace_file(self.path / _ENVIRONMENT, json_bytes(environment))
        replace_file(self.path / _RUN, json_bytes(record))  # last: with it the directory is a run
        self._record = record

    def _remove_leftovers(self, keep_directory: bool) -> None:
        """Remove what an unsuccessful start has written, and the directory itself if it was new."""
        for name in (_RUN, _ENVIRONMENT, _SPEC):
            with suppress(OSError):
                (self.path / name).unlink()
        sweep(self.path)
        with suppress(OSError):
            (self.path / _CHECKPOINTS).rmdir()
        if set(os.listdir(self.path)) <= {_LOCK}:
            with suppress(OSError):
                (self.path / _LOCK).unlink()
                if not keep_directory:
                    self.path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run, without locking it.

        Raises:
            RunError: there is no run, or this version cannot read it.
        """
        path = Path(path)
        file = path / _RUN
        if not os.path.isfile(file):
            raise RunError("not a run directory", str(path), "give the directory that `ensemblekit train` wrote")
        record = read_json(file)
        _check_format(record, file)
        spec = record.get("spec")
        if not isinstance(spec, str) or _sha256(spec) != record.get("spec_sha256"):
            raise RunError("damaged: the spec differs from the one that was written", str(file), "restore the file")
        return cls(path, record)

    def lock(self) -> AbstractContextManager[None]:
        """Lock the run for this process; a `RunError` names the process id if a living process holds the lock."""
        return locked(self.path / _LOCK)

    @property
    def status(self) -> str:
        """How far the run is: "running", "finished", "interrupted" or "failed"."""
        if os.path.lexists(self.path / _RESULT):
            return "finished"
        if is_locked(self.path / _LOCK):
            return "running"
        recorded = self._record.get("status")
        return recorded if recorded == "failed" else "interrupted"

    @property
    def error(self) -> str | None:
        """Why the run failed; None if it did not."""
        error = self._record.get("error")
        return error if self.status == "failed" and isinstance(error, str) else None

    @property
    def created(self) -> str:
        """When the run was begun, in ISO format."""
        return str(self._record.get("created", ""))

    @property
    def notices(self) -> list[str]:
        """What a user should know about the run although it is no error, as recorded last."""
        notices = self._record.get("notices")
        return [str(text) for text in notices] if isinstance(notices, list) else []

    def write_status(self, status: str, error: str | None = None, notices: Sequence[str] | None = None) -> None:
        """Record how the run goes or how it ended; `notices` replace those that were recorded before.

        Before `begin` there is nothing to record: a run that ends before leaves nothing behind.
        """
        if not self._record:
            return
        kept = self.notices if notices is None else list(notices)
        self._record |= {"status": status, "updated": _now(), "error": error, "notices": kept}
        replace_file(self.path / _RUN, json_bytes(self._record))

    def _spec_text(self) -> str:
        file = self.path / _SPEC
        try:
            return file.read_bytes().decode()
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(file), "restore the file") from error
        except UnicodeDecodeError as error:
            raise RunError(f"not UTF-8 text: byte {error.start}", str(file), "restore the file") from error

    def check_spec_unchanged(self) -> None:
        """Raise a `RunError` that names every key of spec.toml whose value differs from when the run was begun."""
        text, file, original = self._spec_text(), str(self.path / _SPEC), str(self._record["spec"])
        if text == original:
            return
        if text == self._record.get("previous_spec"):  # a crash in `lengthen`
            replace_file(self.path / _SPEC, original.encode())
            return
        fix = f"undo the change, or start another run: ensemblekit train {file} --out …"
        try:
            old, new = (_leaves(tomllib.loads(spec), "") for spec in (original, text))
        except (ValueError, RecursionError) as error:
            raise RunError(f"the spec was changed and is no longer valid TOML: {error}", file, fix) from error
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if keys:
            changes = ", ".join(f"{key}: {old.get(key, 'not set')} → {new.get(key, 'not set')}" for key in keys)
            raise RunError(f"the spec was changed: {changes}", file, fix)

    def lengthen(self, spec_toml: str, epoch: int) -> None:
        """Let the run, finished or not, go on after `epoch` epochs with a spec of more epochs; call it with the lock.

        After a crash in between it is an unfinished run with one of both specs; `check_spec_unchanged` completes it.
        """
        with write_errors(self.path):
            (self.path / _RESULT).unlink(missing_ok=True)
        self._record |= {
            "status": "interrupted",
            "updated": _now(),
            "previous_spec": self._record["spec"],
            "spec": spec_toml,
            "spec_sha256": _sha256(spec_toml),
            "continued_from": epoch,
        }
        replace_file(self.path / _RUN, json_bytes(self._record))
        replace_file(self.path / _SPEC, spec_toml.encode())

    @property
    def continued_from(self) -> int | None:
        """The epoch after which the run goes on although it was to end there; None if there is none."""
        epoch = self._record.get("continued_from")
        return epoch if isinstance(epoch, int) else None

    @property
    def newest_position(self) -> Position | None:
        """The moment of the newest checkpoint, which is not verified."""
        return max(self._checkpoints.positions, default=None)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, plugins, device, engine and times of the run."""
        return read_json(self.path / _ENVIRONMENT)

    def update_environment(self, **changes: Any) -> None:
        """Add to the environment, or replace parts of it."""
        replace_file(self.path / _ENVIRONMENT, json_bytes({**self.environment, **changes}))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the metrics of one epoch; after an error no part of the row is in the file."""
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
        """Return the metrics of all epochs, oldest first; an incomplete last line is ignored."""
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
                raise RunError(f"damaged: line {number} is not a JSON object", str(file), "restore or delete the line")
            rows.append(row)
        return rows

    def truncate_metrics(self, epoch: int) -> None:
        """Drop the metrics of all epochs after this one."""
        rows = [row for row in self.read_metrics() if isinstance(row.get("epoch"), int) and row["epoch"] <= epoch]
        replace_file(self.path / _METRICS, b"".join(json_bytes(row, indent=None) for row in rows))

    def save_checkpoint(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Commit a checkpoint; the last two and the best one are kept."""
        self._checkpoints.save(checkpoint, best)
        sweep(self.path)

    def load_checkpoint(self, best: bool = False) -> Checkpoint:
        """Load the newest intact checkpoint, or the best one; a damaged one that is skipped is named in `damage`.

        Without any best checkpoint, `best` loads the newest.

        Raises:
            RunError: no checkpoint is usable, or the best one is lost.
        """
        return self._checkpoints.load(best)

    @property
    def damage(self) -> list[str]:
        """What `load_checkpoint` has found damaged and skipped, in words."""
        return self._checkpoints.damage

    @property
    def checkpoint_epochs(self) -> list[int]:
        """The epochs after which, or after some steps of the next, there is a checkpoint; none of them is verified."""
        return sorted({position.epoch for position in self._checkpoints.positions})

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Store the trained model; it exists once both files are in place."""
        mark = self.path / _MODEL
        with replacing(self.path / _WEIGHTS, mark) as (weights_file, model_file):
            sha256 = write_tensors(weights_file, tensors)
            write_bytes(model_file, json_bytes({"sha256": sha256, "metadata": metadata}))
            mark.unlink(missing_ok=True)  # it describes the weights that are being replaced

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read and verify the tensors and metadata of the trained model; a `RunError` if it is missing or damaged."""
        weights, mark = self.path / _WEIGHTS, self.path / _MODEL
        if not os.path.isfile(weights) or not os.path.isfile(mark):
            raise RunError("the run has not finished", str(self.path), f"ensemblekit resume {self.path}")
        record = read_json(mark)
        metadata = record.get("metadata")
        if not isinstance(metadata, dict):
            raise RunError("damaged: the metadata is missing", str(mark), "restore the file")
        try:
            intact = sha256_of(weights) == record.get("sha256")
            tensors = read_tensors(weights)
        except SafetensorError as error:
            what = "refused: not a safetensors file" + ("" if intact else " (checksum mismatch)")
            raise RunError(what, str(weights), "restore the file; other formats are never loaded") from error
        except OSError as error:
            raise RunError(f"cannot read: {error.strerror}", str(weights), "restore the file") from error
        if not intact:
            raise RunError("checksum mismatch", str(weights), "restore the file")
        return tensors, metadata

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Store the final metrics of the run."""
        replace_file(self.path / _RESULT, json_bytes(result))

    def read_result(self) -> dict[str, Any] | None:
        """Read the final metrics, or None if the run has not finished."""
        file = self.path / _RESULT
        return read_json(file) if os.path.lexists(file) else None


def _check_unused(path: Path) -> None:
    """Raise a `RunError` unless the directory is empty or missing, and writable."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
        raise RunError("cannot write", str(path), f"choose another --out, or make {existing} writable")
    if not os.path.lexists(path):
        return
    with write_errors(path):
        if path.is_dir() and set(os.listdir(path)) <= {_LOCK}:
            return
    if os.path.lexists(path / _RUN):
        fix = f"ensemblekit resume {path}, or choose another --out"
        raise RunError("a run already exists here", str(path), fix)
    what = "the directory is not empty" if path.is_dir() else "not a directory"
    raise RunError(what, str(path), "choose another --out")


def _check_format(record: Mapping[str, Any], file: Path) -> None:
    version = record.get("format_version")
    if not isinstance(version, int):
        raise RunError("damaged: the format version is missing", str(file), "restore the file")
    if version > FORMAT_VERSION:
        what = f"written by a newer version (format {version}; this version reads up to {FORMAT_VERSION})"
        raise RunError(what, str(file), "upgrade ensemblekit")
    if version < 1:
        raise RunError(f"damaged: format {version} does not exist", str(file), "restore the file")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _leaves(value: Any, key: str) -> dict[str, str]:
    """Return all plain values by dotted key, each as text, so that 1 differs from 1.0."""
    if isinstance(value, dict | list) and (value or not key):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, item in items for k, v in _leaves(item, f"{key}.{name}".lstrip(".")).items()}
    return {key: repr(value)}


def _end_of_last_line(descriptor: int) -> int:
    """Return the offset in bytes at which the last complete line of a file ends."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    return os.pread(descriptor, size, 0).rfind(b"\n") + 1
