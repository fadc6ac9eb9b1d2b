"""The run directory as ranks other than the first see it: they read, and the first writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.outputs import KeptOutputs


class FollowedDirectory(RunDirectory):
    """A run directory that another process writes: nothing is written, and nothing is locked."""

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, spec_toml: str, environment: Mapping[str, Any]) -> None:
        pass

    def write_status(self, status: str, error: str | None = None, notices: Sequence[str] | None = None) -> None:
        pass

    def lengthen(self, spec_toml: str, epoch: int) -> None:
        pass

    def restore_spec(self) -> None:
        pass

    def restore_environment(self, environment: Mapping[str, Any]) -> None:
        pass

    def update_environment(self, **changes: Any) -> None:
        pass

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        pass

    def truncate_metrics(self, epoch: int) -> list[dict[str, Any]]:
        return []

    def save_checkpoint(self, checkpoint: Checkpoint, best: bool = False) -> None:
        pass

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        pass

    def write_outputs(self, splits: Mapping[str, KeptOutputs]) -> dict[str, Any]:
        return {}

    def write_result(self, result: Mapping[str, Any]) -> None:
        pass
