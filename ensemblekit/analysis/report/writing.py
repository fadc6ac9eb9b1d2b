"""Writes the report of a run or a sweep to a file, which appears complete or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import UsageError
from ensemblekit.core.registry import Registry
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.runs.atomic import replace_file, write_errors
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import read_run

DEFAULT_NAME = "report.html"


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written, and what is in it."""

    path: Path
    kind: str
    """"run" or "sweep"."""
    sentence: str
    charts: tuple[str, ...]
    """Titles of the figures."""
    num_bytes: int
    notices: tuple[str, ...]


def write_report(path: Path, output: Path | None, registry: Registry, data: Any = None) -> WrittenReport:
    """Compute a report and write it; see `ensemblekit.report`."""
    # matplotlib and Jinja2 take a second to import, which reading a run does not have to wait for
    from ensemblekit.analysis.report.page import render
    from ensemblekit.analysis.report.run_report import run_page

    target = path / DEFAULT_NAME if output is None else output
    if target.is_dir():
        raise UsageError("is a directory", str(target), f"name a file: {target / DEFAULT_NAME}")
    directory = RunDirectory.open(path)
    page = run_page(read_run(directory, registry, RunLoader(directory, registry)), data)
    content = render(page).encode()
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, content)
    titles = tuple(chart.title for chart in page.charts)
    return WrittenReport(target, page.kind, page.sentence, titles, len(content), tuple(page.notices))
