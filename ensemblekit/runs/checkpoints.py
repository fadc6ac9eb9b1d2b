"""Checkpoints: tensors and state of one epoch, in files whose checksums are verified before they are used.

A checkpoint is `epoch-000012.safetensors`, `epoch-000012.json` and, written last, `epoch-000012.manifest.json` with
the sha256 of both. Without its manifest a checkpoint does not exist.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import json_bytes, replacing, sweep, write_bytes, write_errors
from ensemblekit.runs.tensor_files import read_tensors, sha256_of, write_tensors

_NEWEST_KEPT = 2
_OWN_FILE = re.compile(r"epoch-([0-9]{6,})(-again)?\.(safetensors|json|manifest\.json)")
_MANIFEST_SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training needs to continue after an epoch."""

    epoch: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Manifest:
    epoch: int
    best: bool
    stem: str
    tensors_sha256: str
    state_sha256: str

    def content(self) -> bytes:
        return json_bytes(asdict(self))

    def files(self) -> tuple[str, str, str]:
        return f"{self.stem}.safetensors", f"{self.stem}.json", _stem(self.epoch) + _MANIFEST_SUFFIX


class _DamagedError(Exception):
    """A checkpoint whose bytes differ from those that were written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checksum mismatch: {path}: {reason}")


class Checkpoints:
    """The checkpoints of a run; the last two and the best one are kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._damaged: set[int] = set()

    def save(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Commit a checkpoint atomically; only then remove those that are no longer needed."""
        stem = _stem(checkpoint.epoch)
        before = self._manifest_or_none(checkpoint.epoch)
        if before:
            best = best or before.best
            stem += (
                "-again" if before.stem == stem else ""
            )  # the committed one stays intact until the new one is committed
        # an error rather than a state that JSON cannot represent exactly
        state = json.dumps(checkpoint.state, allow_nan=False).encode()
        names = f"{stem}.safetensors", f"{stem}.json", _stem(checkpoint.epoch) + _MANIFEST_SUFFIX
        with replacing(*(self.directory / name for name in names)) as (tensor_file, state_file, manifest_file):
            tensors_sha256 = write_tensors(tensor_file, checkpoint.tensors)
            write_bytes(state_file, state)
            manifest = _Manifest(checkpoint.epoch, best, stem, tensors_sha256, hashlib.sha256(state).hexdigest())
            write_bytes(manifest_file, manifest.content())
        self._damaged.discard(checkpoint.epoch)
        self._prune(checkpoint.epoch)

    def load(self, best: bool = False) -> Checkpoint:
        """Load the newest intact checkpoint; with `best`, the one that was marked as best last, if there is one."""
        epochs = self._epochs()
        if best:
            # one whose manifest cannot be read may have been the best: it is tried, so that its loss is reported
            manifests = {epoch: self._manifest_or_none(epoch) for epoch in epochs}
            epochs.sort(key=lambda epoch: manifest.best if (manifest := manifests[epoch]) else True, reverse=True)
        for epoch in epochs:
            try:
                return self._verified(epoch)
            except _DamagedError as damage:
                self._damaged.add(epoch)
                warnings.warn(f"{damage}; trying the checkpoint before it", RuntimeWarning, stacklevel=3)
        fix = "restore a copy of them" if epochs else "start the run again: ensemblekit train"
        raise RunError("no usable checkpoint", str(self.directory), fix)

    @property
    def epochs(self) -> list[int]:
        """The epochs that have a checkpoint, oldest first; none of them is verified."""
        return self._epochs()[::-1]

    def _epochs(self) -> list[int]:
        """Return the epochs of all manifests, newest first."""
        try:
            matches = [_OWN_FILE.fullmatch(path.name) for path in self.directory.iterdir()]
        except OSError:
            return []
        return sorted((int(name[1]) for name in matches if name and name[3] == "manifest.json"), reverse=True)

    def _manifest(self, epoch: int) -> _Manifest:
        path = self.directory / (_stem(epoch) + _MANIFEST_SUFFIX)
        try:
            content = path.read_bytes()
            manifest = _Manifest(**json.loads(content))
            stems = _stem(epoch), _stem(epoch) + "-again"
            known = manifest.epoch == epoch and manifest.stem in stems and isinstance(manifest.best, bool)
            if not known or manifest.content() != content:
                raise _DamagedError(path, "it differs from what was written")
        except OSError as error:
            raise _DamagedError(path, str(error.strerror)) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise _DamagedError(path, "not a manifest") from error
        return manifest

    def _manifest_or_none(self, epoch: int) -> _Manifest | None:
        try:
            return self._manifest(epoch)
        except _DamagedError:
            return None

    def _verified(self, epoch: int) -> Checkpoint:
        manifest = self._manifest(epoch)
        tensor_file, state_file, _ = (self.directory / name for name in manifest.files())
        for path, sha256 in ((tensor_file, manifest.tensors_sha256), (state_file, manifest.state_sha256)):
            try:
                if sha256_of(path) != sha256:
                    raise _DamagedError(path, "it differs from what was written")
            except OSError as error:
                raise _DamagedError(path, str(error.strerror)) from error
        try:
            return Checkpoint(epoch, read_tensors(tensor_file), json.loads(state_file.read_bytes()))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise _DamagedError(tensor_file, f"refused: {error}") from error

    def _prune(self, newest: int) -> None:
        """Remove all but the last two intact ones and the best; epochs after `newest` will be trained again."""
        epochs = [epoch for epoch in self._epochs() if epoch <= newest and epoch not in self._damaged]
        manifests = [manifest for epoch in epochs if (manifest := self._manifest_or_none(epoch))]
        kept = manifests[:_NEWEST_KEPT] + [manifest for manifest in manifests if manifest.best][:1]
        needed = {name for manifest in kept for name in manifest.files()}
        with write_errors(self.directory):
            names = {path.name for path in self.directory.iterdir() if _OWN_FILE.fullmatch(path.name)} - needed
            # manifests first: one whose files are gone would look like a damaged checkpoint
            for name in sorted(names, key=lambda name: not name.endswith(_MANIFEST_SUFFIX)):
                (self.directory / name).unlink(missing_ok=True)
        sweep(self.directory)


def _stem(epoch: int) -> str:
    return f"epoch-{epoch:06d}"
