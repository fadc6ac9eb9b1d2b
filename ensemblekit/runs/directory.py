"""The run directory: spec, environment, metrics, checkpoints, model and result, safe from a crash at any moment.

Only the process that holds the lock writes; anybody may read at any time. Every file is covered by a checksum, and is
verified whenever it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.runs import model_files, outputs
from ensemblekit.runs.atomic import replace_file, sweep, write_errors
from ensemblekit.runs.checkpoints import Checkpoint, Checkpoints
from ensemblekit.runs.json_files import read_json, write_json
from ensemblekit.runs.locking import is_locked, locked
from ensemblekit.runs.manifests import MetricsMark, Position
from ensemblekit.runs.metrics_file import MetricsFile
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.runs.own_files import (
    CALIBRATION,
    CHECKPOINTS,
    ENVIRONMENT,
    LOCK,
    METRICS,
    MODEL,
    OUTPUTS,
    RESULT,
    RUN,
    SPEC,
    check_own_files,
)
from ensemblekit.runs.record import RunRecord
from ensemblekit.runs.starting import check_unused, is_abandoned, no_run, remove_abandoned

_HISTORY = "history"
"""The key of result.json for the rows of metrics.jsonl."""
_OUTPUTS = "outputs_sha256"
"""The key of result.json for the checksum of outputs.safetensors."""


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path, record: RunRecord | None = None) -> None:
        self.path = path
        self._record = record or RunRecord(path)
        self._checkpoints = Checkpoints(path / CHECKPOINTS)
        self._metrics = MetricsFile(path / METRICS, checksum_required=self._record.has_checksums)

    @classmethod
    @contextmanager
    def claim(cls, path: str | Path, is_new: bool = False) -> Iterator[RunDirectory]:
        """Reserve and lock a directory for a new run; call `begin` in the block, else nothing is left behind.

        Args:
            path: a directory that is empty or does not exist, or in which a run was killed before it saved anything.
            is_new: whether an existing directory was made for this run only.

        Raises:
            RunError: the directory is not empty, not writable, or in use by another process.
        """
        path = Path(path)
        check_unused(path)
        existed = path.exists() and not is_new
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        with locked(path / LOCK):
            check_unused(path)  # another process may have been faster
            abandoned = is_abandoned(path)
            try:
                yield directory
            finally:
                if not directory._record and not abandoned:
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

    def begin(self, spec_toml: str, environment: Mapping[str, Any]) -> None:
        """Write the files that make the directory a run, in place of those of a run that has saved nothing."""
        remove_abandoned(self.path)
        with write_errors(self.path):
            (self.path / CHECKPOINTS).mkdir()  # first: it tells that the files beside it are those of a run
        replace_file(self.path / SPEC, spec_toml.encode())
        write_json(self.path / ENVIRONMENT, environment)
        self._record.begin(spec_toml)  # last: with it the directory is a run
        self._metrics.checksum_required = True

    def _remove_leftovers(self, keep_directory: bool) -> None:
        """Remove what an unsuccessful start has written, and the directory itself if it was new."""
        remove_abandoned(self.path)
        if set(os.listdir(self.path)) <= {LOCK}:
            with suppress(OSError):
                (self.path / LOCK).unlink()
                if not keep_directory:
                    self.path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run, without locking it.

        Raises:
            RunError: there is no run, its run.json is damaged, or this version cannot read it.
        """
        path = Path(path)
        check_own_files(path)
        if os.path.isfile(path / RUN):
            return cls(path, RunRecord.read(path))
        raise no_run(path)

    def lock(self) -> AbstractContextManager[None]:
        """Lock the run for this process; a `RunError` names the process id if a living process holds the lock."""
        return locked(self.path / LOCK)

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished; its result may have been lost since."""
        return os.path.lexists(self.path / RESULT) or self._record.status == "finished"

    @property
    def status(self) -> str:
        """How far the run is: "running", "finished", "interrupted" or "failed"."""
        if self.is_finished:
            return "finished"
        if is_locked(self.path / LOCK):
            return "running"
        return "failed" if self._record.status == "failed" else "interrupted"

    @property
    def error(self) -> str | None:
        """Why the run failed; None if it did not."""
        return self._record.error if self.status == "failed" else None

    @property
    def format_version(self) -> int:
        """The format in which the run was written; 1 is that of version 0.1.0."""
        return self._record.format_version

    @property
    def created(self) -> str:
        """When the run was begun, in ISO format."""
        return self._record.created

    @property
    def notices(self) -> list[str]:
        """What a user should know about the run although it is no error, as recorded last."""
        return self._record.notices

    def write_status(self, status: str, error: str | None = None, notices: Sequence[str] | None = None) -> None:
        """Record how the run goes or how it ended; `notices` replace those that were recorded before.

        A run that ends before `begin` has nothing to record, and leaves nothing behind.
        """
        if not self._record:
            return
        if not self._record.has_checksums:
            self._add_checksums()
        self._record.write_status(status, error, notices)

    def _add_checksums(self) -> None:
        """Bring the files of a run of format 1 to format 2; what is damaged is left as it is."""
        write_json(self.path / ENVIRONMENT, self.environment)
        self._metrics.write(self._metrics.read())
        self._metrics.checksum_required = True
        with suppress(RunError):
            model_files.add_checksum(self.path)
        with suppress(RunError):
            if (result := self.read_result()) is not None:
                self.write_result(result)

    @property
    def spec_toml(self) -> str:
        """The text of spec.toml when the run was begun."""
        return self._record.spec

    def check_spec_unchanged(self) -> None:
        """Raise a `RunError` that names every key of spec.toml whose value differs from when the run was begun."""
        self._record.check_spec_unchanged()

    def lengthen(self, spec_toml: str, epoch: int) -> None:
        """Let the run, finished or not, go on after `epoch` epochs with a spec of more epochs; call it with the lock.

        After a crash in between it is an unfinished run with one of both specs; `restore_spec` completes the change.
        """
        if not self._record.has_checksums:
            self._add_checksums()
        with write_errors(self.path):
            for name in (RESULT, MODEL, OUTPUTS, CALIBRATION):
                (self.path / name).unlink(missing_ok=True)
        self._record.change_spec(spec_toml, continued_from=epoch)

    @property
    def continued_from(self) -> int | None:
        """The epoch after which the run goes on although it was to end there; None if there is none."""
        return self._record.continued_from

    def restore_spec(self) -> None:
        """Write spec.toml again if it is missing, as `damage` then says, or if `lengthen` was killed before it did."""
        if damage := self._record.restore_spec():
            self.damage.append(damage)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, plugins, device, engine and times of the run."""
        holds = "versions, plugins, times and the fingerprint of the data"
        fix = f"restore the file, or delete it and have it recorded anew: ensemblekit resume {self.path}"
        return read_json(self.path / ENVIRONMENT, holds, fix, checksum_required=self._record.has_checksums)

    @property
    def has_environment(self) -> bool:
        """Whether there is an environment, damaged or not."""
        return os.path.lexists(self.path / ENVIRONMENT)

    def restore_environment(self, environment: Mapping[str, Any]) -> None:
        """Record the environment anew after it was lost, as `damage` then says."""
        write_json(self.path / ENVIRONMENT, environment)
        self.damage.append(f"{ENVIRONMENT} was missing: it now describes where the run was resumed")

    def update_environment(self, **changes: Any) -> None:
        """Add to the environment, or replace parts of it."""
        write_json(self.path / ENVIRONMENT, {**self.environment, **changes})

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the metrics of one epoch; after an error no part of the row is in the file."""
        self._metrics.append(row)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of all epochs, oldest first; a `RunError` if rows were changed or are missing."""
        # the mark first: a run that is being trained may append rows in the meantime
        mark, complete = self._checkpoints.metrics_mark, False
        with suppress(RunError):  # a lost result says nothing about the metrics
            if self.is_finished and (saved := self._read_result().get(_HISTORY)) is not None:
                mark, complete = MetricsMark(*saved), True
        return self._metrics.read(mark, complete)

    def truncate_metrics(self, epoch: int) -> list[dict[str, Any]]:
        """Drop the metrics of all epochs after this one, and the checkpoints that were saved after it.

        Rows cannot be recovered. If the file was deleted, the run goes on without those of the past, which `damage`
        then says.

        Returns:
            The rows that are left.

        Raises:
            RunError: rows were changed, or some are missing.
        """
        mark = self._checkpoints.discard_after(epoch)
        if self._metrics.is_missing and mark is not None and mark.rows:
            self._checkpoints.mark_metrics(MetricsMark())
            self.damage.append(f"{METRICS} is missing: the metrics of {mark.rows} epochs are lost")
            mark = None
        rows = [row for row in self._metrics.read(mark) if isinstance(row.get("epoch"), int) and row["epoch"] <= epoch]
        self._metrics.write(rows)
        return rows

    def wants_checkpoint(self, best: bool) -> bool:
        """Return whether a checkpoint would be kept; `best` as for `save_checkpoint`."""
        return True

    def save_checkpoint(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Commit a checkpoint; the last two and the best one are kept."""
        self._checkpoints.save(checkpoint, best, self._metrics.mark())
        sweep(self.path)

    def load_checkpoint(self, best: bool = False, last: Position | None = None) -> Checkpoint:
        """Load the newest intact checkpoint, or the best one; a damaged one that is skipped is named in `damage`.

        Without any best checkpoint, `best` loads the newest. Later ones than `last` are not looked at.

        Raises:
            RunError: no checkpoint is usable, or the best one is lost.
        """
        return self._checkpoints.load(best, last)

    @property
    def damage(self) -> list[str]:
        """What was found damaged or lost and passed over, in words; the run has to report it."""
        return self._checkpoints.damage

    @property
    def newest_position(self) -> Position | None:
        """The moment of the newest checkpoint, which is not verified."""
        return max(self._checkpoints.positions, default=None)

    @property
    def checkpoint_epochs(self) -> list[int]:
        """The epochs after which, or after some steps of the next, there is a checkpoint; none of them is verified."""
        return sorted({position.epoch for position in self._checkpoints.positions})

    @property
    def has_saved_nothing(self) -> bool:
        """Whether the run was stopped before its first checkpoint."""
        return not self._checkpoints.positions and not self.is_finished and self._metrics.mark().rows == 0

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Store the trained model; it exists once both files are in place."""
        model_files.write_model(self.path, tensors, metadata)

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read and verify the tensors and metadata of the trained model; a `RunError` if it is missing or damaged."""
        if not self.is_finished and not model_files.has_model(self.path):
            raise RunError("the run has not finished", str(self.path), f"ensemblekit resume {self.path}")
        return model_files.read_model(self.path, self._record.format_version)

    def read_metadata(self) -> dict[str, Any]:
        """Read and verify what it takes to use the trained model beside its weights, which are not read."""
        return model_files.read_metadata(self.path, self._record.format_version)

    def weights_sha256(self) -> str:
        """Return the checksum of the trained model's weights, which are not read."""
        return model_files.weights_sha256(self.path, self._record.format_version)

    def write_outputs(self, splits: Mapping[str, KeptOutputs]) -> dict[str, Any]:
        """Store the members' outputs by the name of the split; returns what the result has to say about the file."""
        return {_OUTPUTS: outputs.write_outputs(self.path, splits)}

    def add_outputs(self, splits: Mapping[str, KeptOutputs]) -> None:
        """Store the members' outputs of a run that has finished without them; call it with the lock."""
        result = self._read_result()
        write_json(self.path / RESULT, {**result, **self.write_outputs(splits)})

    def read_outputs(self) -> dict[str, KeptOutputs] | None:
        """Read and verify the kept outputs by the name of the split; None if the run has kept none."""
        sha256 = self._read_result().get(_OUTPUTS)
        return None if sha256 is None else outputs.read_outputs(self.path, str(sha256))

    def _check_outputs(self) -> None:
        if (sha256 := self._read_result().get(_OUTPUTS)) is not None:
            outputs.check_outputs(self.path, str(sha256))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Store the final metrics of the run; with them it has finished."""
        write_json(self.path / RESULT, {**result, _HISTORY: self._metrics.mark()})

    def read_result(self) -> dict[str, Any] | None:
        """Read the final metrics, or None if the run has not finished; a `RunError` if they are damaged or lost."""
        if not self.is_finished:
            return None
        return {key: value for key, value in self._read_result().items() if key != _HISTORY}

    def _read_result(self) -> dict[str, Any]:
        fix = f"ensemblekit resume {self.path} rebuilds it from the checkpoints"
        return read_json(self.path / RESULT, "the final metrics", fix, checksum_required=self._record.has_checksums)

    def needs_training(self) -> bool:
        """Whether the run has not finished, or has lost outputs that are to be rebuilt, as `damage` then says."""
        if not self.is_finished:
            return True
        problems = []
        version = self._record.format_version
        for check in (self.read_result, self._check_outputs, lambda: model_files.check_model(self.path, version)):
            try:
                check()
            except RunError as error:
                if error.problem not in problems:  # without its result nothing is known about the outputs
                    problems.append(error.problem)
        self.damage.extend(f"rebuilt from the checkpoints: {problem}" for problem in problems)
        return bool(problems) or self._has_lost_metrics()

    def _has_lost_metrics(self) -> bool:
        try:
            self.read_metrics()
        except RunError:
            return self._metrics.is_missing  # damaged ones cannot be rebuilt, and may still be restored
        return False
