"""A run that is kept in memory: nothing is written to disk, and it cannot be resumed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.outputs import KeptOutputs


class InMemoryRun(RunDirectory):
    """Takes the place of a run directory in training: has the model, the metrics and the best checkpoint."""

    def __init__(self) -> None:
        super().__init__(Path("memory"))  # the name only appears in texts
        self.spec_tables: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        """Those of the trained model."""
        self.metadata: dict[str, Any] = {}
        """What else it takes to use the trained model."""
        self.history: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self._environment: dict[str, Any] = {}
        self._best: Checkpoint | None = None

    def begin(self, spec_toml: str, environment: Mapping[str, Any]) -> None:
        self.spec_tables, self._environment = tomllib.loads(spec_toml), dict(environment)

    @property
    def environment(self) -> dict[str, Any]:
        return self._environment

    def update_environment(self, **changes: Any) -> None:
        self._environment |= changes

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self.history.append(dict(row))

    def wants_checkpoint(self, best: bool) -> bool:
        """Return whether it is the best or the first; others would only be needed to resume."""
        return best or self._best is None

    def save_checkpoint(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Keep a copy in place of the last one that was kept."""
        tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
        self._best = replace(checkpoint, tensors=tensors, state=deepcopy(checkpoint.state))

    def load_checkpoint(self, best: bool = False, last: Position | None = None) -> Checkpoint:
        """Return the best checkpoint."""
        assert best, "only the best checkpoint is kept"
        assert self._best is not None
        return self._best

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self.metadata = dict(metadata)

    def write_outputs(self, splits: Mapping[str, KeptOutputs]) -> dict[str, Any]:
        """Keep no outputs."""
        return {}

    def write_result(self, result: Mapping[str, Any]) -> None:
        self.result = dict(result)
