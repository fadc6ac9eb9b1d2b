"""Reads runs and sweeps for a comparison, one run at a time; what cannot be compared is refused or left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ensemblekit.analysis.comparison import RunFacts
from ensemblekit.analysis.groups import flatten
from ensemblekit.analysis.measures import final_metrics, recorded_measures, sample_quantities, statistics_of
from ensemblekit.analysis.sweeps import SWEEP_FILE, open_sweep
from ensemblekit.core.errors import EnsemblekitError, ResourceError, RunError, UsageError, one_line
from ensemblekit.runs.samples import SplitSamples

if TYPE_CHECKING:
    from ensemblekit.inference.combining import Combiner
    from ensemblekit.runs.run import Run

OpenRun = Callable[[Path], "Run"]
"""Opens a run with the plugins that a user has allowed."""
Progress = Callable[[int, int], None]
"""Told how many of how many runs were read."""
FIX = "give runs of one data set whose test data does not depend on the seed, or compare them one by one"


@dataclass(frozen=True)
class RunsRead:
    """The runs of a comparison."""

    facts: list[RunFacts]
    notes: list[str]
    """The runs that were left out, each with the reason, and those that are calibrated."""


def read_runs(
    paths: Iterable[str | Path], open_run: OpenRun, progress: Progress = lambda done, total: None
) -> RunsRead:
    """Read what a comparison needs of runs, and of the runs of sweeps.

    Args:
        paths: run directories and sweep directories.
        open_run: opens a run.
        progress: told how many runs were read.

    Raises:
        RunError: a path is neither a run nor a sweep, or no run is left.
        UsageError: runs were tested on different data.
    """
    notes: list[str] = []
    found = list(dict.fromkeys(_expanded([Path(path) for path in paths], notes)))
    facts: list[RunFacts] = []
    first: SplitSamples | None = None
    for done, path in enumerate(found):
        progress(done, len(found))
        try:
            run = open_run(path)
            run_facts, test_data = _read(run)
            if description := run.combiner().description:
                notes.append(f"{path}: {description}")
        except (UsageError, ResourceError):
            raise
        except EnsemblekitError as error:
            notes.append(f"left out {path}: {one_line(error.problem)}")
            continue
        first = first or test_data
        if difference := test_data.difference(first):
            what = f"different test data: {difference}"
            raise UsageError(what, f"{path}, compared with {first.path}", FIX)
        facts.append(run_facts)
    progress(len(found), len(found))
    if not facts:
        raise RunError("no finished run to compare", _listed(paths), "finish or repair a run first", details=notes)
    return RunsRead(facts, notes)


def _expanded(paths: Sequence[Path], notes: list[str]) -> Iterator[Path]:
    """Yield the runs; those of a sweep that have not finished are only noted."""
    for path in paths:
        if not any(os.path.lexists(path / name) for name in (SWEEP_FILE, "run.json")):
            what = "not a run or a sweep directory" if path.exists() else "no such directory"
            raise RunError(what, str(path), "give directories that `ensemblekit train` or `ensemblekit sweep` wrote")
    for path in paths:
        if not os.path.lexists(path / SWEEP_FILE):
            yield path
            continue
        sweep = open_sweep(path)
        for run in sweep.runs:
            if run.status == "finished":
                yield run.path
            else:
                notes.append(f"left out {run.path}: {run.status}" + (f", {run.error}" if run.error else ""))


def _read(run: Run) -> tuple[RunFacts, SplitSamples]:
    """Read a run; its outputs are dropped as soon as the quantities of the samples are known."""
    if run.status != "finished":
        raise RunError(f"the run has not finished ({run.status})", str(run.path), f"ensemblekit resume {run.path}")
    kept, combiner = run.outputs("test"), run.combiner()
    statistics = statistics_of(sample_quantities(kept, combiner))
    values = {name: statistic.value() for name, statistic in statistics.items()} | final_metrics(run)
    values |= recorded_measures(run)
    directions = {metric.name: metric.higher_is_better for metric in run.spec.known_metrics}
    keys = flatten(run.spec.to_dict()) | _added_keys(combiner)
    facts = RunFacts(run.path, run.spec.seed, keys, values, statistics, directions, run.validation)
    return facts, SplitSamples.of(run, kept)


def _added_keys(combiner: Combiner) -> dict[str, str]:
    """Return what was added after training as keys of a spec: runs that differ in it are no repetitions."""
    calibration, conformal = combiner.calibration, combiner.conformal
    return {
        "calibration": "none" if calibration is None else calibration.kind,
        "conformal": "none" if conformal is None else f"{conformal.score} {conformal.error:g}",
    }


def _listed(paths: Iterable[str | Path]) -> str:
    listed = [str(path) for path in paths]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
