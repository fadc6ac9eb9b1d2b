"""Reads runs and sweeps for a comparison, one run at a time; what cannot be compared is refused or left out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemblekit.analysis.comparison import RunFacts
from ensemblekit.analysis.groups import flatten
from ensemblekit.analysis.measures import recorded_measures, sample_quantities, statistics_of
from ensemblekit.analysis.sweeps import is_sweep, open_sweep
from ensemblekit.core.errors import EnsemblekitError, ResourceError, RunError, UsageError, one_line

if TYPE_CHECKING:
    from ensemblekit.runs.outputs import KeptOutputs
    from ensemblekit.runs.run import Run

OpenRun = Callable[[Path], "Run"]
"""Opens a run with the plugins that a user has allowed."""
Progress = Callable[[int, int], None]
"""Told how many of how many runs were read."""
FIX = "give runs of one data set whose test data does not depend on the seed, or compare them one by one"


@dataclass(frozen=True)
class TestData:
    """What tells whether two runs were tested on the same samples."""

    path: Path
    dataset: str
    num_samples: int
    targets: str
    index: str
    inputs: str | None
    """The sha256 of the inputs; None if the run has recorded none."""

    @classmethod
    def of(cls, run: Run, kept: KeptOutputs) -> TestData:
        """Describe the test data of a run."""
        inputs = _recorded_inputs(run.environment)
        return cls(run.path, run.spec.data.name, len(kept), _sha256(kept.targets), _sha256(kept.index), inputs)

    def difference(self, other: TestData) -> str:
        """Say how two sets of test data differ; empty if they do not."""
        if self.num_samples != other.num_samples:
            return f"{self.num_samples} test samples of {self.dataset}, not {other.num_samples} of {other.dataset}"
        if self.targets != other.targets:
            return "the targets of its test samples differ" + _named(self.dataset, other.dataset)
        if self.inputs is not None and other.inputs is not None and self.inputs != other.inputs:
            return "the inputs of its test samples differ" + _named(self.dataset, other.dataset)
        if self.index != other.index:
            return "it was tested on other samples of the data set"
        return ""


@dataclass(frozen=True)
class RunsRead:
    """The runs of a comparison."""

    facts: list[RunFacts]
    notes: list[str]
    """The runs that were left out, each with the reason."""


def read_runs(paths: Iterable[str | Path], open_run: OpenRun, progress: Progress = lambda done, total: None) -> RunsRead:
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
    first: TestData | None = None
    for done, path in enumerate(found):
        progress(done, len(found))
        try:
            run_facts, test_data = _read(open_run(path))
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
        if not is_sweep(path) and not os.path.lexists(path / "run.json"):
            what = "not a run or a sweep directory" if path.exists() else "no such directory"
            raise RunError(what, str(path), "give directories that `ensemblekit train` or `ensemblekit sweep` wrote")
    for path in paths:
        if not is_sweep(path):
            yield path
            continue
        sweep = open_sweep(path)
        for run in sweep.runs:
            if run.status == "finished":
                yield run.path
            else:
                notes.append(f"left out {run.path}: {run.status}" + (f", {run.error}" if run.error else ""))


def _read(run: Run) -> tuple[RunFacts, TestData]:
    """Read a run; its outputs are dropped as soon as the quantities of the samples are known."""
    if run.status != "finished":
        raise RunError(f"the run has not finished ({run.status})", str(run.path), f"ensemblekit resume {run.path}")
    kept = run.outputs("test")
    statistics = statistics_of(sample_quantities(kept, run.combiner()))
    values = {name: statistic.value() for name, statistic in statistics.items()} | recorded_measures(run)
    return RunFacts(run.path, run.spec.seed, flatten(run.spec.to_dict()), values, statistics), TestData.of(run, kept)


def _recorded_inputs(environment: dict[str, Any]) -> str | None:
    data = environment.get("data")
    test = data.get("test") if isinstance(data, dict) else None
    sha256 = test.get("inputs_sha256") if isinstance(test, dict) else None
    return sha256 if isinstance(sha256, str) else None


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(f"{tuple(tensor.shape)}".encode() + tensor.to(torch.float64).numpy().tobytes()).hexdigest()


def _named(first: str, second: str) -> str:
    return f" ({first} and {second})" if first != second else ""


def _listed(paths: Iterable[str | Path]) -> str:
    listed = [str(path) for path in paths]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
