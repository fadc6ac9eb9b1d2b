"""The runs below a directory, one line each. Damaged ones are listed as such; torch and plugins are not imported."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError, UsageError, choices, one_line
from ensemblekit.runs.json_files import read_json
from ensemblekit.runs.locking import is_locked
from ensemblekit.runs.manifests import DamagedError, Manifest, MetricsMark, Position, position_of
from ensemblekit.runs.metrics_file import MetricsFile
from ensemblekit.runs.own_files import (
    CHECKPOINTS,
    ENVIRONMENT,
    LOCK,
    METRICS,
    MODEL,
    OUTPUTS,
    RESULT,
    RUN,
    SPEC,
    WEIGHTS,
    check_own_files,
)
from ensemblekit.runs.record import RunRecord
from ensemblekit.runs.starting import is_abandoned

DEFAULT_DIRECTORY = Path("runs")


@dataclass(frozen=True)
class ListedRun:
    """One run of a listing; what is not known is None."""

    name: str
    """Its path below the directory that was searched."""
    path: Path
    status: str
    """"finished", "running", "interrupted", "failed" or "damaged"."""
    reason: str | None = None
    """Why it failed, or what is damaged."""
    epoch: int | None = None
    """The number of finished epochs."""
    method: str | None = None
    model: str | None = None
    members: int | None = None
    data: str | None = None
    accuracy: float | None = None
    """Accuracy on the test data; of an unfinished run, like the measures below, after the last epoch."""
    mse: float | None = None
    loss: float | None = None
    diversity: float | None = None
    started: str | None = None
    """In ISO format, UTC."""
    seconds: float | None = None
    """Time that the run has taken, without that in which it was interrupted."""

    @property
    def status_text(self) -> str:
        """The status in words: `interrupted at epoch 3`, `failed: …`."""
        if self.reason is not None:
            return f"{self.status}: {self.reason}"
        if self.status in ("interrupted", "running") and self.epoch is not None:
            return f"{self.status} at epoch {self.epoch}"
        return self.status

    def to_dict(self) -> dict[str, Any]:
        """Return all values by their names, as JSON or a row of a table."""
        return {**vars(self), "path": str(self.path)}


SORT_KEYS = tuple(name for name in ListedRun.__dataclass_fields__ if name not in ("path", "reason"))


def list_runs(
    directory: str | Path = DEFAULT_DIRECTORY, sort: str = "started", reverse: bool = False
) -> list[ListedRun]:
    """List the runs in a directory and in those below it, such as the runs of a sweep.

    Args:
        directory: where to look; or a run directory.
        sort: what to sort by: "name", "status", "epoch", "method", "model", "members", "data", "accuracy", "mse",
            "loss", "diversity", "started" or "seconds"; with a "-" before it the largest is the first. Runs without
            this value are the last in any case.
        reverse: whether to reverse the order.

    Returns:
        A description of each run; a damaged one has the status "damaged" and the reason.

    Raises:
        UsageError: there is no such directory, or no such key to sort by.
    """
    key = sort.removeprefix("-")
    if key not in SORT_KEYS:
        raise UsageError(f'cannot sort by "{key}"', "sort", choices(key, SORT_KEYS))
    directory = Path(directory)
    if not os.path.isdir(directory):
        what = "not a directory" if os.path.lexists(directory) else "no such directory"
        raise UsageError(what, str(directory), "name a directory with runs in it, or a run")
    runs = list(_found(directory))
    return _sorted(runs, key, reverse != sort.startswith("-"))


def _sorted(runs: Sequence[ListedRun], key: str, reverse: bool) -> list[ListedRun]:
    by_name = sorted(runs, key=lambda run: run.name)
    known = [run for run in by_name if getattr(run, key) is not None]
    unknown = [run for run in by_name if getattr(run, key) is None]
    return [*sorted(known, key=lambda run: getattr(run, key), reverse=reverse), *unknown]


def _found(directory: Path) -> Iterator[ListedRun]:
    """Find the runs below a directory; what cannot be read is listed too. Links are not followed below it."""
    unreadable: list[OSError] = []
    for place, folders, files in os.walk(directory, onerror=unreadable.append):
        path = Path(place)
        if RUN in files or RUN in folders or _has_lost_its_record(path, folders, files):
            folders.clear()
            yield _described(path, _name(path, directory))
            continue
        linked = [name for name in folders if os.path.islink(path / name)]
        for name in linked:
            if os.path.lexists(path / name / RUN):
                yield _described(path / name, _name(path / name, directory))
        folders[:] = [name for name in folders if not name.startswith(".")]
    for error in unreadable:
        path = Path(str(error.filename))
        yield ListedRun(_name(path, directory), path, "damaged", f"cannot read: {error.strerror}")


def _name(path: Path, directory: Path) -> str:
    return path.absolute().name if path == directory else str(path.relative_to(directory))


def _has_lost_its_record(path: Path, folders: Sequence[str], files: Sequence[str]) -> bool:
    """Whether a directory is that of a run which was stopped while it started, or has lost its run.json."""
    return CHECKPOINTS in folders and SPEC in files and ENVIRONMENT in files and LOCK in files


def _described(path: Path, name: str) -> ListedRun:
    """Describe a run as far as its files can be read."""
    run = ListedRun(name, path, "damaged")
    for read in (_read_record, _read_spec, _read_progress):
        try:
            run = read(run)
        except (RunError, OSError) as error:
            what = error.what if isinstance(error, RunError) else f"cannot read: {error.strerror}"
            return replace(run, status="damaged", reason=one_line(what).removeprefix("damaged: "))
    return run


def _read_record(run: ListedRun) -> ListedRun:
    """Add the status and the time of the start, from run.json."""
    check_own_files(run.path)
    if not os.path.lexists(run.path / RUN):
        if is_abandoned(run.path):
            return replace(run, status="running" if is_locked(run.path / LOCK) else "interrupted", epoch=0)
        raise RunError(f"{RUN} is missing", str(run.path), "restore it")
    record = RunRecord.read(run.path)
    status, reason = _status(run.path, record)
    return replace(run, status=status, reason=reason, started=record.created or None)


def _status(path: Path, record: RunRecord) -> tuple[str, str | None]:
    if os.path.lexists(path / RESULT) or record.status == "finished":
        return "finished", None
    if is_locked(path / LOCK):
        return "running", None
    if record.status == "failed":
        return "failed", one_line(record.error or "unknown reason")
    return "interrupted", None


def _read_spec(run: ListedRun) -> ListedRun:
    """Add method, model, members and data: from spec.toml as plain text, so that no plugin needs to be installed."""
    if not os.path.lexists(run.path / RUN):
        return run
    record = RunRecord.read(run.path)
    with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):
        run = _with_spec(run, tomllib.loads(record.spec))
    if run.status in ("finished", "interrupted", "failed"):
        record.check_spec_unchanged()
    return run


def _with_spec(run: ListedRun, spec: Mapping[str, Any]) -> ListedRun:
    ensemble = spec.get("ensemble", {})
    groups = ensemble.get("groups", [])
    groups = [group for group in groups if group.get("role", "member") == "member"]
    models = [_plugin_name(group.get("model")) for group in groups] or [_plugin_name(spec.get("model"))]
    methods = spec.get("method", [])
    methods = methods if isinstance(methods, list) else [methods]
    names = [name for method in methods if (name := _plugin_name(method))]
    members = ensemble.get("members") or sum(group["members"] for group in groups)
    return replace(
        run,
        method=" + ".join(names) or None,
        model=", ".join(dict.fromkeys(filter(None, models))) or None,
        members=members if type(members) is int and members > 0 else None,
        data=_plugin_name(spec.get("data")),
    )


def _plugin_name(value: object) -> str | None:
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else None


def _read_progress(run: ListedRun) -> ListedRun:
    """Add the measures: from the result if the run has finished, else from the last epoch that is recorded."""
    if not os.path.lexists(run.path / RUN):
        return run
    has_checksums = RunRecord.read(run.path).has_checksums
    if run.status == "finished":
        return _read_result(run, has_checksums)
    rows = MetricsFile(run.path / METRICS, has_checksums).read(_metrics_mark(run.path))
    last = rows[-1] if rows else {}
    seconds = [value for row in rows if (value := _number(row.get("seconds"))) is not None]
    newest = max(_positions(run.path), default=Position(0))
    return _with_measures(replace(run, epoch=newest.epoch, seconds=sum(seconds) if rows else None), last)


def _read_result(run: ListedRun, has_checksums: bool) -> ListedRun:
    """Add the measures of a finished run; weights and outputs are not read, but they must be there."""
    result = read_json(run.path / RESULT, "the final metrics", checksum_required=has_checksums)
    metrics, seconds, epochs = result.get("metrics"), result.get("seconds"), result.get("epochs")
    if not isinstance(metrics, dict):
        raise RunError(f"damaged: {RESULT} has no metrics", str(run.path / RESULT), "restore the file")
    total = _number(seconds.get("total")) if isinstance(seconds, dict) else None
    run = _with_measures(replace(run, epoch=epochs if type(epochs) is int else None, seconds=total), metrics)
    for name in (WEIGHTS, MODEL, *([OUTPUTS] if result.get("outputs_sha256") else [])):
        if not os.path.lexists(run.path / name):
            raise RunError(f"{name} is missing", str(run.path / name), f"ensemblekit resume {run.path} rebuilds it")
    return run


def _with_measures(run: ListedRun, metrics: Mapping[str, Any]) -> ListedRun:
    measures = {name: _number(metrics.get(f"test_{name}")) for name in ("accuracy", "mse", "loss", "diversity")}
    return replace(run, **measures)  # type: ignore[arg-type]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _positions(path: Path) -> list[Position]:
    """The moments that have a checkpoint."""
    with suppress(OSError):
        named = {name: position_of(name) for name in os.listdir(path / CHECKPOINTS)}
        return [position for name, position in named.items() if position and name == position.manifest_name]
    return []


def _metrics_mark(path: Path) -> MetricsMark | None:
    """How far the metrics were written at the newest intact checkpoint."""
    for position in sorted(_positions(path), reverse=True):
        with suppress(DamagedError):
            return Manifest.read(path / CHECKPOINTS, position).metrics
    return None
