"""Results of a benchmark as a table for people, as JSON and as CSV."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from ensemblekit.bench.measurement import AutoChoice, Entry, Result
from ensemblekit.bench.workloads import Workload
from ensemblekit.core import kernels
from ensemblekit.display.console import Printer

TABLE_COLUMNS = ("contestant", "ms per step", "± ms", "speed-up", "peak memory", "of GEMM peak")
CSV_COLUMNS = (
    *("date", "machine", "command", "workload", "contestant", "median_seconds", "spread_seconds", "ratio_to_naive"),
    *("peak_memory_mb", "fraction_of_gemm_peak", "auto_choice", "note"),
)
MEGABYTE = 2**20


def machine() -> str:
    """The processor, its cores and the version of torch, in one line."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    name = f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    return name if kernels.library() is not None else f"{name}, without compiled code"


def today() -> str:
    return datetime.now().astimezone().date().isoformat()


def print_title(workload: Workload, printer: Printer) -> None:
    """Print which workload is measured next."""
    printer.heading(workload.name)
    printer.text(f"{workload.title}; batches of {workload.batch_size}")


def print_result(result: Result, printer: Printer) -> None:
    """Print the table and the remarks of one workload; columns without any value are left out."""
    columns = [column for column in zip(TABLE_COLUMNS, *table_rows(result), strict=True) if any(column[1:])]
    names, *rows = zip(*columns, strict=True)
    printer.table(names, rows)
    for line in remarks(result):
        printer.text(line)
    printer.text()


def table_rows(result: Result) -> list[tuple[str, ...]]:
    """A row for each contestant that ran."""
    return [_table_row(entry) for entry in result.entries if not entry.cannot_run]


def _table_row(entry: Entry) -> tuple[str, ...]:
    assert entry.timing is not None
    return (
        entry.contestant,
        f"{1000 * entry.timing.median:.2f}",
        f"{1000 * entry.timing.spread:.2f}",
        "" if entry.ratio is None else f"{entry.ratio:.2f}×",
        "" if entry.memory is None else f"{entry.memory / MEGABYTE:,.0f} MB",
        "" if entry.gemm_fraction is None else f"{100 * entry.gemm_fraction:.1f} %",
    )


def remarks(result: Result) -> list[str]:
    """Which engines cannot run and why, which fast paths the model supports, and what `auto` would choose."""
    lines = [
        f"{entry.contestant} cannot run this workload: {entry.cannot_run}"
        for entry in result.entries
        if entry.cannot_run
    ]
    if result.paths:
        lines.append("; ".join(f"{label} {words}" for label, words in result.paths.items()))
    return [*lines, auto_line(result.auto)] if result.auto else lines


def auto_line(auto: AutoChoice) -> str:
    verdict = "the fastest" if auto.times_the_best == 1 else f"{auto.times_the_best:.2f}× the time of the fastest"
    return f"auto would choose {auto.engine} ({verdict}) after {auto.seconds_of_trying:.1f} s of measuring"


def results_as_csv(results: Iterable[Result], command: str) -> str:
    """A CSV file with a row for each contestant of each workload; `command` repeats the measurement."""
    return csv_text(CSV_COLUMNS, (row for result in results for row in csv_rows(result, command)))


def csv_rows(result: Result, command: str) -> list[dict[str, str]]:
    """A row for each contestant, including those that cannot run."""
    about = {"date": today(), "machine": machine(), "command": command, "workload": result.workload.name}
    choice = result.auto.engine if result.auto else ""
    return [{**about, **_csv_numbers(entry), "auto_choice": choice} for entry in result.entries]


def _csv_numbers(entry: Entry) -> dict[str, str]:
    return {
        "contestant": entry.contestant,
        "median_seconds": _significant(entry.timing.median if entry.timing else None),
        "spread_seconds": _significant(entry.timing.spread if entry.timing else None),
        "ratio_to_naive": _significant(entry.ratio),
        "peak_memory_mb": _significant(entry.memory / MEGABYTE if entry.memory else None),
        "fraction_of_gemm_peak": _significant(entry.gemm_fraction),
        "note": entry.cannot_run,
    }


def _significant(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def csv_text(columns: Sequence[str], rows: Iterable[dict[str, str]]) -> str:
    """A CSV file with a header."""
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """All measurements, including every round."""
    return {
        "date": today(),
        "machine": machine(),
        "gemm_flops_per_second": max((result.gemm_rate for result in results), default=None),
        "workloads": [_result_json(result) for result in results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    auto = result.auto
    return {
        "name": result.workload.name,
        "title": result.workload.title,
        "gemm_flops_per_second": result.gemm_rate,
        "contestants": [_entry_json(entry) for entry in result.entries],
        "paths": dict(result.paths),
        "auto": None
        if auto is None
        else {
            "engine": auto.engine,
            "seconds_of_trying": auto.seconds_of_trying,
            "times_the_best": auto.times_the_best,
        },
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    if entry.timing is None:
        return {"name": entry.contestant, "cannot_run": entry.cannot_run}
    return {
        "name": entry.contestant,
        "median_seconds": entry.timing.median,
        "spread_seconds": entry.timing.spread,
        "seconds": list(entry.timing.seconds),
        "ratio_to_naive": entry.ratio,
        "peak_memory_bytes": entry.memory,
        "fraction_of_gemm_peak": entry.gemm_fraction,
    }
