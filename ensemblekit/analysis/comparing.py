"""Compares runs and sweeps: reads them, compares them, and says what the numbers mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ensemblekit.analysis.advice import Advice, advice, best_group_advice
from ensemblekit.analysis.comparison import Comparison, compare_facts
from ensemblekit.analysis.reading import OpenRun, Progress, read_runs
from ensemblekit.core.errors import UsageError

ADVISED_RUNS = 3
"""Runs of the best group that the advice rests on, at most: their outputs are read again."""


def compare(
    paths: Iterable[str | Path],
    open_run: OpenRun,
    by: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Compare runs and the runs of sweeps on their test data.

    Args:
        paths: run directories and sweep directories.
        open_run: opens a run.
        by: the keys of specs that tell groups apart. Default: all that differ and change what is trained.
        progress: told how many of how many runs were read.

    Raises:
        RunError: a path is neither a run nor a sweep, or no run is left.
        UsageError: runs were tested on different data, or no run has one of the keys.
    """
    paths = list(paths)
    if not paths:
        raise UsageError("nothing to compare", "paths", "give run directories or sweep directories")
    found = read_runs(paths, open_run, progress)
    comparison = compare_facts(found.facts, by, found.notes)
    return replace(comparison, advice=tuple(_advice(comparison, open_run)))


def _advice(comparison: Comparison, open_run: OpenRun) -> list[Advice]:
    """Say which group is the best, if one is, and what its own runs show."""
    best = comparison.best
    own = advice([open_run(run.path) for run in best.runs[:ADVISED_RUNS]])
    if len(comparison.groups) > 1:
        own = [replace(each, text=f"{best.label}: {each.text}") for each in own]
    return [*best_group_advice(comparison), *own]
