"""Writes the performance tables from the committed results: all rows in docs/performance.md, five in the README.

``python tests/benchmarks/performance_table.py`` writes them, ``--check`` only says whether they are up to date.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results" / "targets.csv"
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
IN_README = {
    ("MLP on digits, M=16", "naive loop"): "training 16 MLPs on digits",
    ("MLP on digits, M=64", "torchensemble"): "training 64 MLPs on digits",
    ("ResNet W=16, M=8, B=128, Fashion-MNIST, GNCL", "naive loop"): "training 8 ResNets on Fashion-MNIST",
    ("ResNet W=16, M=8, B=128, Fashion-MNIST, bagging", "torchensemble"): "training 8 bagged ResNets on Fashion-MNIST",
    ("ensemble inference, W=32, M=16, batch 256", "naive loop"): "predicting with 16 ResNets",
}
"""The rows of the README, each with the words that it uses for them."""
Rows = Sequence[dict[str, str]]


def grouped(rows: Rows) -> dict[tuple[str, str], list[dict[str, str]]]:
    """The runs of each kind of work, in the order of the file."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["work"], row["against"]), []).append(row)
    return groups


def full_table(rows: Rows) -> str:
    """A line for each kind of work, with the smallest and the largest result of all runs."""
    lines = ["| work | compared with | target | measured | row |", "|---|---|---|---|---|"]
    for (work, against), runs in grouped(rows).items():
        only = re.sub(r"^.*--only (.+) --run.*$", r"\1", runs[0]["command"])
        lines.append(f"| {work} | {against} | {runs[0]['asked']} | {judged(runs)} | `{only}` |")
    return "\n".join([*lines, "", origin(rows)])


def short_table(rows: Rows) -> str:
    """The README's rows: work, comparison and speed-up."""
    groups = grouped(rows)
    lines = ["| work | compared with | speed-up |", "|---|---|---|"]
    for key, words in IN_README.items():
        if key in groups:
            lines.append(f"| {words} | {key[1]} | {measured(groups[key])} |")
    return "\n".join(lines)


def measured(runs: Rows) -> str:
    """The range of a ratio over the runs, with its unit."""
    unit = _target(runs)[2]
    ratios = sorted(float(run["ratio"]) for run in runs)
    texts = list(dict.fromkeys(f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}" for ratio in ratios))
    return f"{texts[0]}{unit}" if len(texts) == 1 else f"{texts[0]} to {texts[-1]}{unit}"


def judged(runs: Rows) -> str:
    """The range over the runs, and whether all of them, some or none reach the target."""
    sign, bound, _ = _target(runs)
    text = measured(runs) + (f" in {len(runs)} runs" if len(runs) > 1 else " in one run")
    if not sign:
        return text
    ratios = [float(run["ratio"]) for run in runs]
    reached = [ratio >= float(bound) if sign == "≥" else ratio <= float(bound) for ratio in ratios]
    return f"**{text}**" if all(reached) else f"{text}, not always" if any(reached) else f"{text}, not reached"


def _target(runs: Rows) -> tuple[str, str, str]:
    """Sign, bound and unit; empty for a row that says how things are and has no target."""
    if runs[0]["asked"] == "–":
        return "", "", ""
    sign, bound, unit = re.fullmatch(r"([≥≤]) ([\d.]+)(.*)", runs[0]["asked"]).groups()
    return sign, bound, unit


def origin(rows: Rows) -> str:
    """When, where and by which command the results were measured."""
    dates = sorted({row["date"] for row in rows})
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    command = rows[0]["command"].partition(" --only")[0]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} on {machines}, by `{command} --only ROW --run RUN`."


def update(document: Path, table: str, check: bool) -> Iterable[str]:
    """Put a table between the markers of a document, or only compare; yields what is wrong."""
    old = document.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        yield f"{document.name} needs the lines {BEGIN} and {END}, each once"
        return
    before, _, rest = old.partition(BEGIN)
    new = f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
    if check and new != old:
        yield f"{document.name} differs from the results; run this without --check"
    if not check:
        document.write_text(new, encoding="utf-8")


def main() -> None:
    """Write the tables, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    if not options.results.exists():
        sys.exit(f"error: no {options.results.name}; measure with python tests/benchmarks/targets.py --run 1")
    with options.results.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    problems = [
        *update(options.page, full_table(rows), options.check),
        *update(options.readme, short_table(rows), options.check),
    ]
    if problems:
        sys.exit(f"error: {'; '.join(problems)}")


if __name__ == "__main__":
    main()
