"""Checkpoints: tensors and state of one moment of training, in files that are verified before they are used.

A checkpoint is `epoch-000012.safetensors`, `epoch-000012.json` and, written last, `epoch-000012.manifest.json` with
the sha256 of both. Inside an epoch the name has the step too: `epoch-000012-step-000345`. Without its manifest a
checkpoint does not exist.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.core.files import sha256_of_file
from ensemblekit.runs.atomic import replace_file, replacing, sweep, write_bytes, write_errors
from ensemblekit.runs.manifests import DamagedError, Manifest, MetricsMark, Position, position_of
from ensemblekit.runs.tensor_files import read_tensors, write_tensors

_NEWEST_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training needs to continue after `epoch` epochs and `step` steps of the next one."""

    epoch: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    step: int = 0

    @property
    def position(self) -> Position:
        """The moment of training at which it was saved."""
        return Position(self.epoch, self.step)


class Checkpoints:
    """The checkpoints of a run; the last two and the best one are kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damage: list[str] = []
        """What was found damaged by `load`, in words; a run has to report it."""
        self._damaged: set[Position] = set()
        self._best: Position | None = None
        self._best_known = False
        """Whether `_best` is that of the last checkpoint that was loaded or saved here."""

    def save(self, checkpoint: Checkpoint, best: bool = False, metrics: MetricsMark | None = None) -> None:
        """Commit a checkpoint atomically; only then remove those that are no longer needed.

        Args:
            checkpoint: what to save; a checkpoint of the same moment is replaced.
            best: whether it is the best so far.
            metrics: how far metrics.jsonl is written.
        """
        position = checkpoint.position
        before = self._manifest_or_none(position)
        # the committed one stays intact until the new one is committed
        stem = position.stem + ("-again" if before and before.stem == position.stem else "")
        best_position = position if best else self._best_before(position)
        # an error rather than a state that JSON cannot represent exactly
        state = json.dumps(checkpoint.state, allow_nan=False).encode()
        names = f"{stem}.safetensors", f"{stem}.json", position.manifest_name
        with replacing(*(self.directory / name for name in names)) as (tensor_file, state_file, manifest_file):
            tensors_sha256 = write_tensors(tensor_file, checkpoint.tensors)
            write_bytes(state_file, state)
            state_sha256 = hashlib.sha256(state).hexdigest()
            manifest = Manifest(position, best_position, stem, tensors_sha256, state_sha256, metrics)
            write_bytes(manifest_file, manifest.content())
        self._damaged.discard(position)
        self._best, self._best_known = best_position, True
        self._prune(position)

    def load(self, best: bool = False, last: Position | None = None) -> Checkpoint:
        """Load the newest intact checkpoint; those that are damaged are skipped and named in `damage`.

        With `best`, load the best one, or the newest if none is the best; later ones than `last` are not looked at.

        Raises:
            RunError: no checkpoint is usable, or the best one is lost; no other takes its place.
        """
        return self._load_best() if best else self._load_newest(last)

    def _load_newest(self, last: Position | None) -> Checkpoint:
        positions = [position for position in self.positions[::-1] if last is None or position <= last]
        for position in positions:
            try:
                checkpoint = self._verified(position)
            except DamagedError as damage:
                self._damaged.add(position)
                self.damage.append(f"{damage}; the checkpoint before it is used")
            else:
                self._best, self._best_known = self._best_before(position, known=False), True
                return checkpoint
        fix = "restore a copy of them" if positions else "start the run again: ensemblekit train"
        raise RunError("no usable checkpoint", str(self.directory), fix)

    def _load_best(self) -> Checkpoint:
        positions = self.positions
        if not positions:
            raise RunError("no usable checkpoint", str(self.directory), "start the run again: ensemblekit train")
        try:
            newest = Manifest.read(self.directory, positions[-1])
            if newest.format_version == 1:  # only the best one itself says that it is the best
                marked = [Manifest.read(self.directory, position).best for position in positions]
                best = next((position for position in marked[::-1] if position), None)
            else:
                best = newest.best
            return self._verified(best or positions[-1])
        except DamagedError as damage:
            fix = 'restore the file, or start another run with training.keep = "last"'
            raise RunError(f"the best checkpoint is lost ({damage})", str(self.directory), fix) from damage

    @property
    def positions(self) -> list[Position]:
        """The moments that have a checkpoint, oldest first; none of them is verified."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except OSError:
            return []
        found = {name: position_of(name) for name in names}
        return sorted(position for name, position in found.items() if position and name == position.manifest_name)

    @property
    def metrics_mark(self) -> MetricsMark | None:
        """How far metrics.jsonl was written at the newest checkpoint; None if no checkpoint says so."""
        for position in self.positions[::-1]:
            if manifest := self._manifest_or_none(position):
                return manifest.metrics
        return None

    def discard_after(self, epoch: int) -> MetricsMark | None:
        """Remove the checkpoints of later epochs, which will be trained again; returns `metrics_mark` without them."""
        with write_errors(self.directory):
            for position in self.positions:
                if position.epoch > epoch:
                    (self.directory / position.manifest_name).unlink(missing_ok=True)
        return self.metrics_mark

    def mark_metrics(self, metrics: MetricsMark) -> None:
        """Change in all checkpoints how far metrics.jsonl is written."""
        for position in self.positions:
            if manifest := self._manifest_or_none(position):
                content = replace(manifest, metrics=metrics, best=self._best_before(position, known=False)).content()
                replace_file(self.directory / position.manifest_name, content)

    def _best_before(self, position: Position, known: bool = True) -> Position | None:
        """Return the best checkpoint up to a moment: the one known here, else what the manifests say."""
        if known and self._best_known:
            return self._best
        for earlier in reversed([other for other in self.positions if other <= position]):
            manifest = self._manifest_or_none(earlier)
            if manifest and (manifest.best or manifest.format_version > 1):
                return manifest.best
        return None

    def _manifest_or_none(self, position: Position) -> Manifest | None:
        try:
            return Manifest.read(self.directory, position)
        except DamagedError:
            return None

    def _verified(self, position: Position) -> Checkpoint:
        manifest = Manifest.read(self.directory, position)
        tensor_file, state_file, _ = (self.directory / name for name in manifest.files)
        for path, sha256 in ((tensor_file, manifest.tensors_sha256), (state_file, manifest.state_sha256)):
            try:
                if sha256_of_file(path) != sha256:
                    raise DamagedError(path, "it differs from what was written")
            except OSError as error:
                raise DamagedError(path, str(error.strerror)) from error
        try:
            state = json.loads(state_file.read_bytes())
            return Checkpoint(position.epoch, read_tensors(tensor_file), state, position.step)
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise DamagedError(tensor_file, f"refused: {error}") from error

    def _prune(self, newest: Position) -> None:
        """Remove all but the newest two and the best; what was saved after `newest` will be trained again.

        A checkpoint inside an epoch is only of use until the next one is saved: with the newest goes the last one
        at the end of an epoch, unless there is none.
        """
        usable = [position for position in self.positions[::-1] if position <= newest and position not in self._damaged]
        manifests = {position: self._manifest_or_none(position) for position in usable}
        readable = [position for position in usable if manifests[position]]
        earlier = sorted(readable[1:], key=lambda position: position.step > 0)  # stable: the newest first
        kept = {*readable[:1], *earlier[: _NEWEST_KEPT - 1]} | ({self._best} if self._best else set())
        with write_errors(self.directory):
            for name in self._unneeded({position: manifests.get(position) for position in kept}):
                (self.directory / name).unlink(missing_ok=True)
        sweep(self.directory)

    def _unneeded(self, kept: Mapping[Position, Manifest | None]) -> list[str]:
        """Return the files of checkpoints that are not those of the manifests; all are needed if one is damaged."""
        positions = {path.name: position_of(path.name) for path in self.directory.iterdir()}
        unneeded = []
        for name, position in positions.items():
            manifest = kept.get(position) if position else None
            if position and (position not in kept or (manifest and name not in manifest.files)):
                unneeded.append(name)
        # manifests first: one whose files are gone would look like a damaged checkpoint
        return sorted(unneeded, key=lambda name: not name.endswith(".manifest.json"))
