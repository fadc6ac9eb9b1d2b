"""The report of a sweep: the comparison of its runs, the figure, the advice, and a link to every run."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tomli_w
from matplotlib import rc_context

from ensemblekit.analysis import figures, table_formats
from ensemblekit.analysis.comparing import compare
from ensemblekit.analysis.comparison import Comparison
from ensemblekit.analysis.measures import MEASURES
from ensemblekit.analysis.report import facts
from ensemblekit.analysis.report.charts import Chart, DataTable, number, percent
from ensemblekit.analysis.report.page import Link, Page, PageTable, Section, advised
from ensemblekit.analysis.sweep_rows import SweepRun
from ensemblekit.analysis.sweeps import Sweep, SweepDirectory
from ensemblekit.core.errors import EnsemblekitError
from ensemblekit.runs.run import Run

OpenRun = Callable[[Path], Run]
Progress = Callable[[int, int], None]


def sweep_page(path: Path, target: Path, open_run: OpenRun, progress: Progress) -> Page:
    """Compute the report of a sweep; runs that cannot be compared are listed all the same.

    Args:
        path: the sweep directory.
        target: where the page will be, which links to runs are relative to.
        open_run: opens a run.
        progress: told how many of how many runs were read.
    """
    directory = SweepDirectory.open(path)
    sweep = directory.read()
    notices: list[str] = []
    comparison = None
    try:
        comparison = compare([path], open_run, progress=progress)
        notices += comparison.notes
    except EnsemblekitError as error:
        notices.append(f"The runs are not compared: {error.problem}.")
    finished = sweep.with_status("finished")
    return Page(
        title=path.resolve().name or str(path),
        kind="sweep",
        sentence=_sentence(sweep, comparison),
        sections=[] if comparison is None else _figure_sections(comparison, notices),
        tables=[] if comparison is None else [_comparison_table(comparison)],
        notices=notices,
        advice=[] if comparison is None else advised(comparison.advice),
        links=[_link(run, target) for run in sweep.runs],
        overview=_overview(sweep),
        times=[("all runs", facts.duration(sum(run.seconds or 0.0 for run in sweep.runs)))],
        environment=_environment(finished, open_run),
        command=shlex.join(["ensemblekit", "sweep", "spec.toml"]),
        command_note="Save the spec below as spec.toml.",
        spec=tomli_w.dumps(directory.tables),
    )


def _sentence(sweep: Sweep, comparison: Comparison | None) -> str:
    """Say in one sentence what the sweep is and which group is ahead."""
    counts = Counter(run.status for run in sweep.runs)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    text = f"A sweep of {len(sweep.runs)} run{'s' * (len(sweep.runs) != 1)} ({statuses})"
    if comparison is None:
        return f"{text}."
    measure, best = MEASURES[comparison.primary], comparison.best
    cell = best.cells[comparison.primary]
    value = percent(cell.mean) if measure.unit == "%" else number(cell.mean)
    sure = "" if cell.mark == "best" or len(comparison.groups) == 1 else ", though not beyond noise"
    return f"{text}: {best.label or 'the only group'} is ahead, with {measure.title} {value}{sure}."


def _comparison_table(comparison: Comparison) -> PageTable:
    titles, rows = table_formats.text_table(comparison, comparison.columns)
    return PageTable(
        "comparison", "Comparison", DataTable.of(titles, rows), " · ".join(table_formats.LEGEND.split("   "))
    )


def _figure_sections(comparison: Comparison, notices: list[str]) -> list[Section]:
    """Draw the figure of the comparison; what it cannot show is a notice."""
    try:
        with rc_context(figures.SETTINGS):
            figure = figures.draw(comparison)
    except EnsemblekitError as error:
        notices.append(f"There is no figure: {error.problem}.")
        return []
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    names = [name for name in comparison.columns if MEASURES[name].statistic is not None or name == "train_loss"]
    columns = ["group", *(table_formats.title_of(name) for name in names)]
    rows = [
        (group.label, *(table_formats.cell_text(group.cells.get(name), MEASURES[name], sign=False) for name in names))
        for group in comparison.groups
    ]
    chart = Chart(
        name="comparison-figure",
        title="Measures of the groups",
        caption="A column for each base model, a row for each measure; bands are the standard deviation over seeds.",
        description="; ".join(f"{row[0]}: {columns[1]} {row[1]}" for row in rows[:20]),
        figure=figure,
        table=DataTable.of(columns, rows),
        wide=True,
    )
    return [Section("figure", "Figure", [chart])]


def _link(run: SweepRun, target: Path) -> Link:
    """Link a run's own report if there is one, else its directory."""
    address = ""
    if run.path.is_dir():
        page = run.path / "report.html"
        linked = (page if page.is_file() else run.path).resolve()
        # "./": a name with a colon must not look like a scheme
        address = "./" + quote(os.path.relpath(linked, target.parent.resolve()))
    return Link(run.name, address, run.status, run.error or _result(run))


def _result(run: SweepRun) -> str:
    metrics = run.metrics
    if (accuracy := metrics.get("test_accuracy")) is not None:
        return f"accuracy {percent(accuracy)}"
    if (mse := metrics.get("test_mse")) is not None:
        return f"mean squared error {number(mse)}"
    return ""


def _overview(sweep: Sweep) -> list[tuple[str, str]]:
    """Return the values that were varied."""
    values: dict[str, list[str]] = {}
    for run in sweep.runs:
        for key, value in {"variant": run.variant, **run.overrides, "seed": run.seed}.items():
            if value not in ("", None):
                values.setdefault(key, []).append(str(value))
    return [("runs", str(len(sweep.runs)))] + [(key, ", ".join(dict.fromkeys(texts))) for key, texts in values.items()]


def _environment(finished: Sequence[SweepRun], open_run: OpenRun) -> list[tuple[str, Any]]:
    """Return the environment of the first finished run."""
    for run in finished:
        try:
            return [("of the run", run.name), *facts.environment(open_run(run.path))]
        except EnsemblekitError:
            continue
    return []
