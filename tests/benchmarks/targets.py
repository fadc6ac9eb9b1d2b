"""Measures every performance target and saves the results as CSV; the tables of the documentation are made from them.

``python tests/benchmarks/targets.py --run 1`` measures all rows, ``--only mlp-64`` one of them; rows of the same run
are replaced. Needs ``pip install -e '.[benchmarks]'``. ``--smoke`` only shows that each row runs, and saves nothing.
The rows against JAX need an environment with ``pip install jax optax scikit-learn``, named by ``--jax-python``.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from ensemblekit.core.waiting import limit_spinning

limit_spinning()  # as the command line does, before torch is imported

# ruff: noqa: E402
from measured import Measured, Options
from rows_against_itself import ROWS_AGAINST_ITSELF
from rows_against_jax import ROWS_AGAINST_JAX
from rows_against_others import ROWS_AGAINST_OTHERS
from rows_of_auto import PARTS_OF_AUTO, ROWS_OF_AUTO
from rows_of_busy_machines import ROWS_OF_BUSY_MACHINES
from rows_of_convolutions import ROWS_OF_CONVOLUTIONS
from rows_of_growth import ROWS_OF_GROWTH
from rows_of_inference import ROWS_OF_INFERENCE
from rows_of_ranks import ROWS_OF_RANKS
from rows_of_streaming import ROWS_OF_STREAMING
from rows_of_sweeps import ROWS_OF_SWEEPS

from ensemblekit.bench.report import csv_text, machine, today

ROWS = ROWS_AGAINST_OTHERS | ROWS_AGAINST_JAX | ROWS_AGAINST_ITSELF
ROWS |= ROWS_OF_BUSY_MACHINES | ROWS_OF_CONVOLUTIONS | ROWS_OF_GROWTH | ROWS_OF_RANKS
ROWS |= ROWS_OF_INFERENCE | ROWS_OF_STREAMING | ROWS_OF_AUTO | ROWS_OF_SWEEPS
RESULTS = Path(__file__).parent / "results" / "targets.csv"
COLUMNS = ("date", "machine", "command", "run", "work", "against", "asked", "ratio", "low", "high", "note")
KEY = ("run", "work", "against")


def main() -> None:
    """Measure the selected rows, and save each one as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*ROWS, *PARTS_OF_AUTO], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--run", type=int, default=1, help="number of this run, to repeat the measurements")
    parser.add_argument("--cifar100", type=Path, help="a folder or archive with CIFAR-100, as for image_folder")
    parser.add_argument("--jax-python", type=Path, help="the interpreter of an environment with JAX")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny workloads, one round, only to see that everything runs"
    )
    parser.add_argument("--output", type=Path, help=f"default: results/{RESULTS.name}; nothing with --smoke")
    options = parser.parse_args()
    output = options.output or (None if options.smoke else RESULTS)
    needs_jax = [name for name in options.only or ROWS if name in ROWS_AGAINST_JAX and options.jax_python is None]
    if options.only and needs_jax:
        parser.error(f"--only {', '.join(needs_jax)}: name an interpreter with JAX by --jax-python")
    for name in options.only or ROWS:
        if name in needs_jax:
            print(f"{name}: not measured, it needs --jax-python", flush=True)
            continue
        more = " --cifar100 …" if options.cifar100 and name == "pipeline" else ""
        more += " --jax-python …" if name in ROWS_AGAINST_JAX else ""
        command = f"python tests/benchmarks/targets.py --only {name}{more} --run {options.run}"
        for measured in (ROWS | PARTS_OF_AUTO)[name](Options(options.smoke, options.cifar100, options.jax_python)):
            row = {"date": today(), "machine": machine(), "command": command, **_cells(measured, options.run)}
            print(f"{name}: {measured.work} | {measured.against} | asked {measured.asked} | ", end="")
            print(f"{row['ratio']} ({row['low']} to {row['high']}) | {measured.note}", flush=True)
            if output is not None:
                save(row, output)


def _cells(measured: Measured, run: int) -> dict[str, str]:
    numbers = {name: f"{getattr(measured, name):.3g}" for name in ("ratio", "low", "high")}
    words = {name: getattr(measured, name) for name in ("work", "against", "asked", "note")}
    return {"run": str(run), **words, **numbers}


def save(row: dict[str, str], path: Path) -> None:
    """Add a row to the file, or replace the one with the same run, work and baseline."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = {tuple(old[name] for name in KEY): old for old in csv.DictReader(file)}
    rows[tuple(row[name] for name in KEY)] = row
    path.parent.mkdir(exist_ok=True)
    path.write_text(csv_text(COLUMNS, rows.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
