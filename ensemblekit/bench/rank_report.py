"""Results of steps on ranks as a table for people, as JSON and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ensemblekit.bench.ranks import RESNET_18_CLASSES, RESNET_18_PARAMETERS, RankEntry, RankResult
from ensemblekit.bench.report import csv_text, machine, today
from ensemblekit.display.console import Printer

TABLE_COLUMNS = ("contestant", "engine", "ms per step", "± ms", "speed", "in exchanges", "sent per step and rank")
CSV_COLUMNS = (
    *("date", "machine", "command", "workload", "contestant", "engine", "ranks", "median_seconds", "spread_seconds"),
    *("speed", "share_in_exchanges", "exchange_seconds", "bytes_sent", "all_reduce_bytes", "all_reduce_bytes_resnet18"),
)


def print_rank_result(result: RankResult, printer: Printer) -> None:
    """Print the table and the remarks of one workload."""
    printer.table(TABLE_COLUMNS, [_row(entry) for entry in result.entries])
    for line in remarks(result):
        printer.text(line)
    printer.text()


def _row(entry: RankEntry) -> tuple[str, ...]:
    alone = entry.num_ranks == 1
    return (
        entry.contestant,
        entry.engine,
        f"{1000 * entry.timing.median:.2f}",
        f"{1000 * entry.timing.spread:.2f}",
        f"{entry.speed:.2f}×",
        "" if alone else f"{100 * entry.share_in_exchanges:.1f} %",
        "" if alone else size(entry.bytes_sent),
    )


def remarks(result: RankResult) -> list[str]:
    """How long an exchange takes when nobody waits, and what gradients would cost instead."""
    lines = []
    for entry in result.entries:
        if entry.num_ranks == 1:
            continue
        bare = f"{entry.contestant}: the exchange itself takes {1000 * entry.bare_exchange:.2f} ms"
        lines.append(f"{bare}; the rest of the time in exchanges is waiting for the slower rank")
        for label, total in _totals(result).items():
            cost = result.all_reduce_bytes(entry.num_ranks, total)
            ratio = cost / entry.bytes_sent
            formula = f"2 · (n − 1) / n · 4 · {total:,} bytes"
            lines.append(f"gradients of {label}, ring all-reduce: {formula} = {size(cost)}, {ratio:,.1f} times as much")
    return lines


def _totals(result: RankResult) -> dict[str, int]:
    """The trainable parameters of these members, and of as many ResNet-18 if they have as many classes."""
    number, totals = result.num_members, {"these members": result.parameters}
    if result.workload.num_outputs == RESNET_18_CLASSES:
        totals[f"{number} ResNet-18"] = number * RESNET_18_PARAMETERS
    return totals


def size(num_bytes: float) -> str:
    """A number of bytes in a unit of its size, 1 kB = 1,000 bytes."""
    unit, factor = ("MB", 1e6) if num_bytes >= 1e6 else ("kB", 1e3)
    return f"{num_bytes / factor:,.1f} {unit}"


def rank_results_as_csv(results: Iterable[RankResult], command: str) -> str:
    """A CSV file with a row for each contestant of each workload; `command` repeats the measurement."""
    about = {"date": today(), "machine": machine(), "command": command}
    rows = (
        {**about, "workload": result.workload.name, **{key: str(value) for key, value in _facts(result, entry).items()}}
        for result in results
        for entry in result.entries
    )
    return csv_text(CSV_COLUMNS, rows)


def rank_results_as_json(results: Sequence[RankResult]) -> dict[str, Any]:
    """All measurements, including every round."""
    workloads = [
        {
            "name": result.workload.name,
            "title": result.workload.title,
            "parameters": result.parameters,
            "contestants": [
                {**_facts(result, entry), "seconds": list(entry.timing.seconds)} for entry in result.entries
            ],
        }
        for result in results
    ]
    return {"date": today(), "machine": machine(), "workloads": workloads}


def _facts(result: RankResult, entry: RankEntry) -> dict[str, Any]:
    resnet_18 = result.num_members * RESNET_18_PARAMETERS
    return {
        "contestant": entry.contestant,
        "engine": entry.engine,
        "ranks": entry.num_ranks,
        "median_seconds": entry.timing.median,
        "spread_seconds": entry.timing.spread,
        "speed": entry.speed,
        "share_in_exchanges": entry.share_in_exchanges,
        "exchange_seconds": entry.bare_exchange,
        "bytes_sent": entry.bytes_sent,
        "all_reduce_bytes": result.all_reduce_bytes(entry.num_ranks),
        "all_reduce_bytes_resnet18": result.all_reduce_bytes(entry.num_ranks, resnet_18),
    }
