"""Writes the README's performance table from the committed results, between its two markers.

``python tests/benchmarks/readme_table.py`` writes it, ``--check`` only says whether the README has it as it should be.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results" / "targets.csv"
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
Rows = Sequence[dict[str, str]]


def rendered(rows: Rows) -> str:
    """The table in Markdown: a line for each kind of work, with the least and the most of all runs."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["work"], row["against"]), []).append(row)
    lines = ["| work | against | asked | reached | measured by |", "|---|---|---|---|---|"]
    for (work, against), runs in groups.items():
        only = re.sub(r"^.*(--only .+) --run.*$", r"\1", runs[0]["command"])
        lines.append(f"| {work} | {against} | {runs[0]['asked']} | {reached(runs)} | `{only}` |")
    return "\n".join([*lines, "", origin(rows)])


def reached(runs: Rows) -> str:
    """The range of a ratio over the runs, and whether all of them, some or none are as asked."""
    sign, bound, unit = re.fullmatch(r"([≥≤]) ([\d.]+)(.*)", runs[0]["asked"]).groups()
    ratios = sorted(float(run["ratio"]) for run in runs)
    text = f"{ratios[0]:.3g}{unit}" if len(ratios) == 1 else f"{ratios[0]:.3g} to {ratios[-1]:.3g}{unit}"
    text += f" in {len(ratios)} runs" if len(ratios) > 1 else " in one run"
    kept = [ratio >= float(bound) if sign == "≥" else ratio <= float(bound) for ratio in ratios]
    return f"**{text}**" if all(kept) else f"{text}, not always" if any(kept) else f"{text}, not reached"


def origin(rows: Rows) -> str:
    """When, where and by which command."""
    dates = sorted({row["date"] for row in rows})
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    command = rows[0]["command"].partition(" --only")[0]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} on {machines}, by `{command} --only ROW --run RUN`."


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the README differs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    if not options.results.exists():
        sys.exit(f"error: no {options.results.name}; measure with python tests/benchmarks/targets.py --run 1")
    with options.results.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    readme = options.readme.read_text(encoding="utf-8")
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        sys.exit(f"error: {options.readme.name} needs the lines {BEGIN} and {END}, each once")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    new = f"{before}{BEGIN}\n{rendered(rows)}\n{END}{after}"
    if options.check and new != readme:
        sys.exit(f"error: {options.readme.name} is not what {options.results.name} says; run this without --check")
    if not options.check:
        options.readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
