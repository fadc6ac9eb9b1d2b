"""The table of a listing of runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ensemblekit.analysis.run_list import ListedRun
from ensemblekit.display.numbers import duration, number, quality_text

MAX_STATUS = 80
"""Longer reasons are cut; --json has all of them."""


def run_table(runs: Sequence[ListedRun]) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows; columns without any value are left out."""
    columns = ["run", "status", "method", "model", "members", "data", "accuracy", "MSE", "loss", "diversity"]
    columns += ["started", "time"]
    rows = [_row(run) for run in runs]
    used = [index for index in range(len(columns)) if index < 2 or any(row[index] for row in rows)]
    return [columns[index] for index in used], [[row[index] for index in used] for row in rows]


def _row(run: ListedRun) -> list[str]:
    status = run.status_text
    return [
        run.name,
        status if len(status) <= MAX_STATUS else f"{status[: MAX_STATUS - 1]}…",
        run.method or "",
        run.model or "",
        "" if run.members is None else str(run.members),
        run.data or "",
        quality_text(run.accuracy, "accuracy"),
        number(run.mse),
        number(run.loss),
        number(run.diversity),
        _local(run.started),
        duration(run.seconds),
    ]


def _local(started: str | None) -> str:
    """Format a moment in the time zone of the machine."""
    try:
        return datetime.fromisoformat(started or "").astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError):
        return started or ""
