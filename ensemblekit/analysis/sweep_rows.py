"""The runs of a sweep as their directories show them, and the table of results: read by anybody, at any time."""

from __future__ import annotations

import csv
import io
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ensemblekit.analysis.grids import PlannedRun, cell
from ensemblekit.core.errors import EnsemblekitError, one_line
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.locking import is_locked

ENDED_EARLY = ("failed", "damaged", "pruned")
"""Statuses that only results.csv may know: the directory of such a run can look like that of an interrupted one."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, as far as it is."""

    name: str
    path: Path
    overrides: Mapping[str, Any]
    """Values by dotted path; without the seed."""
    variant: str
    seed: int
    status: str
    """"planned", "running", "interrupted", "finished", "failed", "damaged" or, in a search, "pruned"."""
    error: str = ""
    """Why the run failed, or what is damaged."""
    epochs: int = 0
    """Epochs that were trained."""
    seconds: float | None = None
    """Time of training and evaluation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final metrics on the test data, and those of training and validation at the epoch whose weights are kept."""
    curve: Sequence[float | None] = ()
    """In a search: the metric that decides, after each epoch."""


def read_sweep_run(
    planned: PlannedRun, path: Path, recorded: Mapping[str, str] | None = None, metric: str | None = None
) -> SweepRun:
    """Read how far a run is; nothing that is wrong with its directory is an error here.

    Args:
        planned: the run.
        path: its directory, which need not exist.
        recorded: its row of results.csv: the only trace of a run that failed before it had a directory, whose process
            was killed, or that was pruned.
        metric: the metric whose curve to read, in a search.
    """

    def run(status: str, **facts: Any) -> SweepRun:
        return SweepRun(planned.name, path, planned.overrides, planned.variant, planned.seed, status, **facts)

    if is_unstarted(path):
        if is_locked(path / ".lock"):
            return run("running")  # another process is about to begin it
        if recorded and recorded.get("status") == "failed":
            return run("failed", error=recorded.get("error", ""))
        return run("planned")
    try:
        directory = RunDirectory.open(path)
        result, history, status = directory.read_result(), directory.read_metrics(), directory.status
        metrics: dict[str, Any] = {}
        if result is not None:
            metrics = {**kept_metrics(history, keeps_best(directory)), **dict(result["metrics"])}
        error = directory.error or ""
        if status == "interrupted" and recorded and recorded.get("status") in ENDED_EARLY:
            status, error = recorded["status"], recorded.get("error", "")
            metrics = dict(history[-1]) if history and status == "pruned" else {}
        seconds = sum(row.get("seconds") or 0.0 for row in history) if history else None
        facts = {"epochs": len(history), "seconds": seconds, "metrics": _numbers(metrics)}
        curve = [row.get(metric) for row in history] if metric else ()
        return run(status, error=one_line(error), curve=curve, **facts)
    except EnsemblekitError as error:
        return run("damaged", error=one_line(error.line))
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # the files are not as runs write them
        return run("damaged", error=one_line(f"unexpected structure ({type(error).__name__}: {error})"))


def is_unstarted(path: Path) -> bool:
    """Whether there is no run yet: no directory, or one in which a run was about to be started."""
    try:
        names = set(os.listdir(path))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    leftovers = {".lock", "spec.toml", "environment.json", "checkpoints"}
    if not all(name in leftovers or name.startswith(".writing-") for name in names):
        return False
    checkpoints = path / "checkpoints"
    return not checkpoints.is_dir() or not os.listdir(checkpoints)


def keeps_best(directory: RunDirectory) -> bool:
    """Whether a run keeps the weights of its best epoch."""
    spec = tomllib.loads((directory.path / "spec.toml").read_text(encoding="utf-8"))
    return bool(spec["training"].get("keep") == "best")


def kept_metrics(history: Sequence[Mapping[str, Any]], best: bool) -> dict[str, Any]:
    """Return the metrics of training and validation data at the epoch whose weights a run keeps."""
    evaluated = [row for row in history if row.get("validation_loss") is not None]
    if best and evaluated:
        row = min(evaluated, key=lambda row: row["validation_loss"])
    else:
        row = history[-1] if history else {}
    return {name: value for name, value in row.items() if name.startswith(("train_", "validation_"))}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    skipped = ("epoch", "seconds", "learning_rate", "images_per_second", "samples_per_second")
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in skipped
    }


def table_of(runs: Iterable[SweepRun], root: Path) -> list[dict[str, Any]]:
    """Return a row for each run: name, variant, overrides by dotted path, seed, status, error, metrics, time, path."""
    runs = list(runs)
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    searches = any(run.curve for run in runs)
    rows = []
    for run in runs:
        row: dict[str, Any] = {"name": run.name, "variant": run.variant}
        row |= {key: run.overrides.get(key) for key in keys}
        row |= {"seed": run.seed, "status": run.status, "error": run.error, "epochs": run.epochs}
        row |= {name: run.metrics.get(name) for name in metrics}
        row |= {"curve": list(run.curve)} if searches else {}
        row |= {"seconds": run.seconds, "path": _relative(run.path, root)}
        rows.append(row)
    return rows


def _relative(path: Path, root: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return str(path)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as RFC 4180 has it; an unknown value is empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(rows[0] if rows else ("name",))
    writer.writerows([_csv_cell(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(item is None or isinstance(item, float) for item in value) and value:
        return " ".join("" if item is None else repr(item) for item in value)
    return cell(value)


def read_csv(path: Path) -> dict[str, dict[str, str]]:
    """Read the rows of results.csv by name; a file that is missing or damaged has none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {row["name"]: row for row in csv.DictReader(file) if row.get("name")}
    except (OSError, ValueError, KeyError, csv.Error):
        return {}
