"""A sweep on disk: `sweep.toml` with its spec and its runs, `results.csv`, and the run directories below `runs/`.

`sweep.toml` is written before the first run and only ever extended; everything else is found in the run directories, so
that a sweep that was killed anywhere continues from there.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import tomli_w

from ensemblekit.analysis.grids import PlannedRun, cell
from ensemblekit.analysis.plans import SweepPlan, Tables
from ensemblekit.analysis.sweep_rows import SweepRun, as_csv, read_csv, read_sweep_run, table_of
from ensemblekit.core.errors import RunError
from ensemblekit.runs.atomic import replace_file, write_errors
from ensemblekit.runs.atomic import sweep as remove_temporary_files
from ensemblekit.runs.locking import is_locked, locked

FORMAT_VERSION = 1
SWEEP_FILE, SPEC_FILE, RESULTS_FILE, RUNS, LOCK = "sweep.toml", "spec.toml", "results.csv", "runs", ".lock"


@dataclass(frozen=True)
class Sweep:
    """A sweep, opened for reading."""

    path: Path
    runs: list[SweepRun]

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of results.csv as values: overrides by dotted path, seed, status, final metrics …"""
        return table_of(self.runs, self.path)

    def with_status(self, *statuses: str) -> list[SweepRun]:
        """Return the runs that have one of these statuses."""
        return [run for run in self.runs if run.status in statuses]

    def __repr__(self) -> str:
        finished = len(self.with_status("finished"))
        return f"Sweep({str(self.path)!r}, {finished} of {len(self.runs)} runs finished)"


def open_sweep(path: str | Path) -> Sweep:
    """Open a sweep, finished or not, without locking or running it.

    Args:
        path: the sweep directory.

    Raises:
        RunError: there is no sweep, or its files are damaged. A damaged run is listed as such.
    """
    return SweepDirectory.open(path).read()


def is_sweep(path: str | Path) -> bool:
    """Whether a path is a sweep directory."""
    return os.path.isfile(Path(path) / SWEEP_FILE)


class SweepDirectory:
    """The directory of one sweep."""

    def __init__(self, path: Path, record: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.record: dict[str, Any] = dict(record or {})
        """The content of sweep.toml; empty in a new directory."""
        self.recorded: dict[str, dict[str, str]] = read_csv(path / RESULTS_FILE)
        """The rows of results.csv by name: they know of runs that failed without a directory, or were pruned."""

    @classmethod
    @contextmanager
    def claim(cls, out: str | Path | None, name: str) -> Iterator[SweepDirectory]:
        """Lock a sweep directory: an existing sweep, an empty directory, or a new one.

        Args:
            out: the directory; None for sweeps/NAME-NUMBER with the first free number.
            name: see `out`.

        Raises:
            RunError: the directory holds something else, is in use or cannot be written.
        """
        path, is_new = (Path(out), not os.path.lexists(out)) if out else (_next_path(name), True)
        _check_usable(path)
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        with locked(path / LOCK):
            _check_usable(path)
            directory = cls.open(path) if is_sweep(path) else cls(path)
            remove_temporary_files(path)
            try:
                yield directory
            finally:
                if not directory.record and is_new:
                    with suppress(OSError):
                        (path / LOCK).unlink()
                        path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> SweepDirectory:
        """Open an existing sweep without locking it."""
        path = Path(path)
        file = path / SWEEP_FILE
        if not os.path.isfile(file):
            raise RunError("not a sweep directory", str(path), "give the directory that `ensemblekit sweep` wrote")
        return cls(path, _read_record(file))

    @property
    def runs(self) -> list[PlannedRun]:
        """The planned runs."""
        return [
            PlannedRun(run["variant"], run["overrides"], run["seed"], tuple(run["varied"]), run["name"])
            for run in self.record.get("runs", [])
        ]

    @property
    def known_names(self) -> dict[str, str]:
        """The names of the planned runs by their identity."""
        return {run.identity: run.name for run in self.runs}

    @property
    def tables(self) -> Tables:
        """The spec of the sweep with its section [sweep], as written."""
        return {**self.record["spec"], "sweep": self.record["sweep"]}

    def run_path(self, name: str) -> Path:
        """The directory of a run."""
        return self.path / RUNS / name

    def write_plan(self, plan: SweepPlan, search: Mapping[str, Any] | None = None) -> None:
        """Write sweep.toml, if anything has changed; an existing sweep may only be extended.

        Raises:
            RunError: the directory belongs to a sweep of another spec, or one with other runs.
        """
        if self.record:
            check_extends(self, plan, search or {})
        record: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "spec": plan.tables,
            "sweep": plan.section.to_table(),
            "runs": [_run_table(run) for run in plan.runs],
        }
        if search:
            record["search"] = dict(search)
        if record != self.record:
            self.record = record
            with write_errors(self.path):
                (self.path / RUNS).mkdir(exist_ok=True)
            text = tomli_w.dumps(record)
            replace_file(self.path / SWEEP_FILE, f'sha256 = "{_sha256(text)}"\n{text}'.encode())

    def write_spec(self) -> Path:
        """Write the spec that all runs share to a file of its own, for single runs by hand; returns its path."""
        replace_file(self.path / SPEC_FILE, tomli_w.dumps(self.record["spec"]).encode())
        return self.path / SPEC_FILE

    def is_running(self, name: str) -> bool:
        """Whether a process is training a run."""
        return is_locked(self.run_path(name) / LOCK)

    def record_end(self, name: str, status: str, error: str) -> None:
        """Remember how a run ended, if its directory may not know it."""
        self.recorded[name] = {"name": name, "status": status, "error": error}

    def forget_end(self, name: str) -> None:
        """Forget how a run ended, to try it again."""
        self.recorded.pop(name, None)

    def read(self) -> Sweep:
        """Read how far every run is."""
        return Sweep(self.path, [self.read_run(run) for run in self.runs])

    def read_run(self, planned: PlannedRun) -> SweepRun:
        """Read how far one run is."""
        metric = self.record.get("search", {}).get("metric")
        return read_sweep_run(planned, self.run_path(planned.name), self.recorded.get(planned.name), metric)

    def write_results(self, runs: Sequence[SweepRun]) -> None:
        """Write results.csv atomically: a row for each planned run."""
        replace_file(self.path / RESULTS_FILE, as_csv(table_of(runs, self.path)).encode())


def check_extends(directory: SweepDirectory, plan: SweepPlan, search: Mapping[str, Any]) -> None:
    """Raise a `RunError` unless a plan has the spec and all runs of an existing sweep; it may have more runs."""
    fix = (
        "continue it with its own spec and grid (more seeds, values or variants may be added), or choose another --out"
    )
    old, new = (leaves(tables) for tables in (directory.record["spec"], plan.tables))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        changes = ", ".join(f"{key}: {old.get(key, 'not set')} → {new.get(key, 'not set')}" for key in changed[:5])
        raise RunError(f"the directory has a sweep of another spec ({changes})", str(directory.path), fix)
    before = {key: value for key, value in directory.record.get("search", {}).items() if key != "trials"}
    if before != {key: value for key, value in search.items() if key != "trials"}:
        raise RunError("the directory has a sweep with another search", str(directory.path), fix)
    planned = {run.identity for run in plan.runs}
    missing = [run.name for run in directory.runs if run.identity not in planned]
    if missing and not search:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"the directory has a sweep of another grid: {missing[0]}{more} would not be in this one"
        raise RunError(what, str(directory.path), fix)


def leaves(value: Any, key: str = "") -> dict[str, str]:
    """Return all plain values of tables by dotted key, each as text."""
    if isinstance(value, Mapping) and (value or not key):
        found = (leaves(item, f"{key}.{name}".lstrip(".")) for name, item in value.items())
        return {path: text for part in found for path, text in part.items()}
    return {key: cell(value)}


def _run_table(run: PlannedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "variant": run.variant,
        "seed": run.seed,
        "varied": list(run.varied),
        "overrides": dict(run.overrides),
    }


def _next_path(name: str) -> Path:
    """Make sweeps/NAME-NUMBER with the first free number; sweeps that start together get different ones."""
    for number in count(1):
        path = Path("sweeps", f"{name}-{number}")
        with write_errors(path), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("unreachable")


def _check_usable(path: Path) -> None:
    """Raise a `RunError` unless the directory is a sweep, empty or missing."""
    if not os.path.lexists(path) or is_sweep(path):
        return
    if not path.is_dir():
        raise RunError("not a directory", str(path), "choose another --out")
    with write_errors(path):
        names = set(os.listdir(path)) - {LOCK}
    if not all(name.startswith(".writing-") or (name == RUNS and not os.listdir(path / RUNS)) for name in names):
        raise RunError("the directory is not empty, and not a sweep", str(path), "choose another --out")


def _read_record(file: Path) -> dict[str, Any]:
    damaged = "restore the file"
    try:
        record = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise RunError(f"cannot read: {error.strerror}", str(file), damaged) from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"damaged: not TOML ({error})", str(file), damaged) from error
    version = record.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        what = f"written by a newer version (format {version}; this version reads up to {FORMAT_VERSION})"
        raise RunError(what, str(file), "upgrade ensemblekit")
    if record.pop("sha256", None) != _sha256(tomli_w.dumps(record)):
        raise RunError("damaged: it differs from what was written", str(file), damaged)
    if not _is_complete(record):
        raise RunError("damaged: unexpected structure, or a name that is not the name of a run", str(file), damaged)
    return record


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Whether sweep.toml has the structure in which it is written; a name is never a path to somewhere else."""
    types = {"name": str, "variant": str, "seed": int, "varied": list, "overrides": dict}
    runs = record.get("runs")
    return (
        isinstance(record.get("spec"), dict)
        and isinstance(record.get("sweep"), dict)
        and isinstance(runs, list)
        and all(isinstance(run.get(key), kind) for run in runs for key, kind in types.items())
        and all(re.fullmatch(r"[\w+=,-][\w.+=,-]*", run["name"], flags=re.ASCII) for run in runs)
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
