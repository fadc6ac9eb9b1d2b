"""Rows of sweeps: runs that are trained together, as one stack, against the same runs one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measured import Measured, Options, Row, faster

from ensemblekit.bench.timing import Timing

ROOT = Path(__file__).parents[2]
ROUNDS = 3


def together(options: Options) -> Iterator[Measured]:
    """Eight values of lambda, 16 MLPs each, on digits: the whole command, and the training that the runs record."""
    rounds, settings = (1, ["training.epochs=1", "ensemble.members=2"]) if options.smoke else (ROUNDS, [])
    whole: dict[str, list[float]] = {"separate": [], "together": []}
    training: dict[str, list[float]] = {"separate": [], "together": []}
    for _ in range(rounds):
        for name, flags in {"separate": [], "together": ["--together"]}.items():
            seconds, seconds_in_training = sweep(["ensemble.members=16", *settings], flags)
            whole[name].append(seconds)
            training[name].append(seconds_in_training)
    work, note = (
        "sweep --together, 8 values of λ, M=16 MLPs, digits, 30 epochs",
        "engine stacked; process start included",
    )
    timings = {name: Timing(tuple(seconds)) for name, seconds in whole.items()}
    yield faster(f"{work}: whole command", "plain sweep", "≥ 3×", timings["separate"], timings["together"], note)
    timings = {name: Timing(tuple(seconds)) for name, seconds in training.items()}
    note = "from the first step to the end of all runs, with evaluations and checkpoints"
    yield faster(f"{work}: training", "plain sweep", "≥ 3×", timings["separate"], timings["together"], note)


def sweep(settings: list[str], flags: list[str]) -> tuple[float, float]:
    """Run the command; returns its seconds, and those that its runs took without their start."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "sweep"
        options = [part for setting in [*settings, 'engine.name="stacked"'] for part in ("--set", setting)]
        command = [sys.executable, "-m", "ensemblekit", "sweep", str(ROOT / "specs" / "digits.toml"), "--quiet"]
        started = time.perf_counter()
        subprocess.run(
            [*command, "--grid", "method.lambda=0:0.7:0.1", "--out", str(out), *options, *flags],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - started
        each = [json.loads(file.read_text())["seconds"] for file in sorted(out.glob("runs/*/result.json"))]
    spent = [row["training"] + row["evaluation"] + row["checkpoints"] for row in each]
    # runs that are together train at the same time
    return seconds, max(spent) if flags else sum(spent)


ROWS_OF_SWEEPS: dict[str, Row] = {"together": together}
