"""What trackers share: when they open and close, and which epochs they still lack after a run was resumed."""

from __future__ import annotations

import json
import tomllib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from ensemblekit import EnsemblekitError, Extension, PluginError, atomic_write, hookimpl

if TYPE_CHECKING:
    from ensemblekit import Spec

Row = dict[str, Any]
"""The metrics of an epoch by their names, and its number as `epoch`."""

FINAL = "final/"
"""Final metrics are logged under names that begin like this: they belong to the weights that the run has kept."""


@dataclass(frozen=True)
class TrackedRun:
    """A run directory as a tracker reads it: the files are those that docs/runs-and-resume.md describes."""

    path: Path

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec as tables."""
        return tomllib.loads((self.path / "spec.toml").read_text(encoding="utf-8"))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, plugins, device, engine, and the fingerprint of the data."""
        return _without_checksum(json.loads((self.path / "environment.json").read_text(encoding="utf-8")))

    @property
    def history(self) -> list[Row]:
        """The metrics of the epochs that have finished; none of an epoch that will be trained again."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [_without_checksum(json.loads(line)) for line in lines]

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that the run belongs to; None if it is a single run."""
        folder = self.path.absolute().parent
        return folder.parent.name if folder.name == "runs" and (folder.parent / "sweep.toml").exists() else None

    def read_state(self, name: str) -> dict[str, Any]:
        """Return what a tracker has remembered in the run directory; empty if there is nothing that can be used."""
        try:
            state = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def write_state(self, name: str, state: Mapping[str, str]) -> None:
        """Remember something in the run directory, in a file NAME.json."""
        with atomic_write(self.path / f"{name}.json") as staged:
            staged.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


class Tracker(Extension):
    """Logs a run, new or resumed, so that every epoch is there once.

    It opens when the run directory is complete, so that a run that cannot start leaves nothing behind. A resumed run
    is first brought up to date from metrics.jsonl, which is truncated to the last checkpoint: epochs that the tracker
    has lost in a crash are logged then, and those that it has already are not logged again.
    """

    _plugins: list[type[Any]] = PrivateAttr(default_factory=list)
    _run: TrackedRun | None = PrivateAttr(None)
    """The run that is being logged; None if nothing is open."""

    @hookimpl
    def run_started(self, spec: Spec, path: Path, plan: Sequence[tuple[str, str]]) -> None:
        """Find a missing package at once; open the log of a resumed run."""
        is_resumed = any(label == "resume" for label, _ in plan)
        self._plugins = [type(plugin) for _, plugin in spec.plugins()]
        self._run = None
        self.check(is_resumed)
        if is_resumed:
            self._begin(path)

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        """Open the log of a new run with its first checkpoint, before its first step."""
        if self._run is None:
            self._begin(path)

    @hookimpl
    def epoch_finished(self, metrics: Mapping[str, Any]) -> None:
        """Log an epoch."""
        self.log(dict(metrics))

    @hookimpl
    def run_ended(self, status: str, metrics: Mapping[str, Any], error: BaseException | None) -> None:
        """Log the result and close the log, also if the run was interrupted or failed."""
        run, self._run = self._run, None
        if run is not None:
            self.close(run, status, metrics, error)

    def _begin(self, path: Path) -> None:
        run = TrackedRun(path)
        self._run = run
        self.open(run)
        for row in run.history:
            self.log(row)

    def check(self, is_resumed: bool) -> None:
        """Raise an `EnsemblekitError` if this tracker cannot be used here, before anything is trained."""

    @abstractmethod
    def open(self, run: TrackedRun) -> None:
        """Start a log, or continue the one that was started before the run was interrupted."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Log the metrics of an epoch, unless they are logged already."""

    @abstractmethod
    def close(self, run: TrackedRun, status: str, metrics: Mapping[str, Any], error: BaseException | None) -> None:
        """Log how the run ended; arguments as for the hook `run_ended`."""

    def report_page(self, run: TrackedRun) -> Path:
        """Write the report of a finished run as report.html in its directory.

        Raises:
            EnsemblekitError: it cannot be written, or the run uses a network that was passed in Python.
        """
        from ensemblekit import report

        try:
            return report(run.path, plugins=self._plugins)
        except EnsemblekitError as error:
            what = f"there is no report among the artifacts: {error.problem}"
            raise PluginError(what, f'extension "{self.name}"', "set report = false, or add it yourself") from error


def missing_package(name: str, extra: str, extension: str) -> PluginError:
    """Return the error for a package that is not installed."""
    return PluginError(f"{name} is not installed", f'extension "{extension}"', f"pip install 'ensemblekit[{extra}]'")


def error_text(error: BaseException) -> str:
    """Say on one line what ended a run."""
    return error.line if isinstance(error, EnsemblekitError) else f"{type(error).__name__}: {error}".removesuffix(": ")


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, without the number of the epoch."""
    return {
        name: value
        for name, value in metrics.items()
        if name != "epoch" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted paths: ``training.optimizer.lr``, ``methods.0.name``."""
    return dict(_leaves(table, prefix))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _without_checksum(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "sha256"}
