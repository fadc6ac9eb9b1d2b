"""The manifest of a checkpoint: its files and their checksums, which checkpoint is the best, how long the metrics are.

A manifest carries its own checksum. Manifests of format 1 have none, and say only whether they are the best themselves.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ensemblekit.runs.sealing import encoded, is_intact, sealed

MANIFEST_FORMAT = 2
_OWN_FILE = re.compile(r"epoch-([0-9]{6,18})(?:-step-([0-9]{6,18}))?(-again)?\.(safetensors|json|manifest\.json)")
_FORMAT_1_KEYS = ["epoch", "best", "stem", "tensors_sha256", "state_sha256"]


class DamagedError(Exception):
    """A checkpoint whose bytes differ from those that were written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checksum mismatch: {path}: {reason}")


class Position(NamedTuple):
    """A moment of training: finished epochs, and finished steps of the next one."""

    epoch: int
    step: int = 0

    @property
    def stem(self) -> str:
        """The beginning of the names of its files."""
        return f"epoch-{self.epoch:06d}" + (f"-step-{self.step:06d}" if self.step else "")

    @property
    def manifest_name(self) -> str:
        """The name of its manifest."""
        return f"{self.stem}.manifest.json"

    def __str__(self) -> str:
        return f"epoch {self.epoch}" + (f", step {self.step}" if self.step else "")


class MetricsMark(NamedTuple):
    """How far metrics.jsonl was written: its number of rows, and the checksum of the last one."""

    rows: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    position: Position
    best: Position | None
    """The best checkpoint when this one was saved; in format 1 only if it is this one."""
    stem: str
    tensors_sha256: str
    state_sha256: str
    metrics: MetricsMark | None = None
    """None in format 1."""
    format_version: int = MANIFEST_FORMAT

    @classmethod
    def read(cls, directory: Path, position: Position) -> Self:
        """Read and verify the manifest of a checkpoint."""
        path = directory / position.manifest_name
        try:
            content = path.read_bytes()
            record = json.loads(content)
            manifest = cls._of(record)
            stems = position.stem, f"{position.stem}-again"
            as_written = content == encoded(record) and manifest.position == position and manifest.stem in stems
        except OSError as error:
            raise DamagedError(path, str(error.strerror)) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(path, "not a manifest") from error
        if not as_written:
            raise DamagedError(path, "it differs from what was written")
        return manifest

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Self:
        files = record["stem"], record["tensors_sha256"], record["state_sha256"]
        if list(record) == _FORMAT_1_KEYS:
            if not isinstance(record["best"], bool):
                raise TypeError
            position = Position(record["epoch"])
            return cls(position, position if record["best"] else None, *files, format_version=1)
        if not is_intact(record) or record["format_version"] != MANIFEST_FORMAT:
            raise ValueError
        best = None if record["best"] is None else Position(*record["best"])
        return cls(Position(record["epoch"], record["step"]), best, *files, MetricsMark(*record["metrics"]))

    def content(self) -> bytes:
        """Return the content of the manifest's file."""
        record = {
            "format_version": MANIFEST_FORMAT,
            "epoch": self.position.epoch,
            "step": self.position.step,
            "best": self.best,
            "stem": self.stem,
            "tensors_sha256": self.tensors_sha256,
            "state_sha256": self.state_sha256,
            "metrics": self.metrics or MetricsMark(),
        }
        return encoded(sealed(record))

    @property
    def files(self) -> tuple[str, str, str]:
        """The names of the checkpoint's files: tensors, state and manifest."""
        return f"{self.stem}.safetensors", f"{self.stem}.json", self.position.manifest_name


def position_of(name: str) -> Position | None:
    """Return the position of the checkpoint that a file belongs to; None if it is no checkpoint's file."""
    match = _OWN_FILE.fullmatch(name)
    return Position(int(match[1]), int(match[2] or 0)) if match else None
