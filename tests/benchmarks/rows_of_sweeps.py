"""Rows of sweeps: runs that are trained together, as one stack, against the same runs one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fitting import CPU
from measured import Measured, Options, Row, faster

import ensemblekit as ek
from ensemblekit.bench.timing import Timing, interleaved
from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.engines.together import SharedStack
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
ROUNDS = 3


def together(options: Options) -> Iterator[Measured]:
    """Eight values of lambda, 16 MLPs each, on digits: the whole command, what the runs record, and steps alone."""
    rounds, settings = (1, ["training.epochs=1", "ensemble.members=2"]) if options.smoke else (ROUNDS, [])
    settings = ['engine.name="stacked"', "ensemble.members=16", *settings]
    whole: dict[str, list[float]] = {"separate": [], "together": [], "commands": []}
    training: dict[str, list[float]] = {"separate": [], "together": []}
    for _ in range(rounds):
        for name, flags in {"separate": [], "together": ["--together"]}.items():
            seconds, seconds_in_training = sweep(settings, flags)
            whole[name].append(seconds)
            training[name].append(seconds_in_training)
        whole["commands"].append(eight_commands(settings))
    work, note = (
        "sweep --together, 8 values of λ, M=16 MLPs, digits, 30 epochs",
        "engine stacked; process start included",
    )
    timings = {name: Timing(tuple(seconds)) for name, seconds in whole.items()}
    yield faster(f"{work}: whole command", "plain sweep", "≥ 3×", timings["separate"], timings["together"], note)
    against = "eight `ensemblekit train`, one after the other"
    yield faster(f"{work}: whole command", against, "–", timings["commands"], timings["together"], note)
    timings = {name: Timing(tuple(seconds)) for name, seconds in training.items()}
    note = "from the first step to the end of all runs, with evaluations and checkpoints"
    yield faster(f"{work}: without start", "plain sweep", "≥ 3×", timings["separate"], timings["together"], note)
    yield steps(options)


def steps(options: Options) -> Measured:
    """Training steps alone, of eight runs in one stack against the same runs in stacks of their own."""
    members, number, rounds = (2, 2, 1) if options.smoke else (16, 50, 7)
    keep_freed_memory()

    def trained(shared: SharedStack | None) -> Callable[[], None]:
        engines = []
        for index in range(8):
            overrides = {"ensemble.members": members, "method.lambda": index / 10, "engine.name": "stacked"}
            spec = ek.load_spec(ROOT / "specs" / "digits.toml", overrides)
            trainer = Trainer(spec, RunDirectory(Path("unused")), device=CPU, shared=shared)
            engines.append(trainer.engine.current())
        batch = next(iter(trainer.data.train.training_batches(64, 0, 1)))

        def work() -> None:
            for step in range(number):
                for engine in engines:
                    engine.prepare_step(batch, None, 1e-3, step)
                for engine in engines:
                    engine.train_step(batch, None, 1e-3, step)

        return work

    timings = interleaved({"separate": trained(None), "together": trained(SharedStack())}, rounds)
    work = "steps of 8 runs in one stack, M=16 MLPs, digits"
    return faster(work, "each run in its own stack", "≥ 3×", timings["separate"], timings["together"], "engine stacked")


def sweep(settings: list[str], flags: list[str]) -> tuple[float, float]:
    """Run the command; returns its seconds, and those that its runs took without their start."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "sweep"
        seconds = command("sweep", ["--grid", "method.lambda=0:0.7:0.1", "--out", str(out), *flags], settings)
        each = [json.loads(file.read_text())["seconds"] for file in sorted(out.glob("runs/*/result.json"))]
    spent = [row["training"] + row["evaluation"] + row["checkpoints"] for row in each]
    # runs that are together train at the same time
    return seconds, max(spent) if flags else sum(spent)


def eight_commands(settings: list[str]) -> float:
    """Train the same eight runs by a command each; returns the seconds of all."""
    with tempfile.TemporaryDirectory() as directory:
        outs = [Path(directory) / str(index) for index in range(8)]
        values = [f"method.lambda={index / 10}" for index in range(8)]
        return sum(
            command("train", ["--out", str(out)], [*settings, value]) for out, value in zip(outs, values, strict=True)
        )


def command(verb: str, flags: list[str], settings: list[str]) -> float:
    """Run a verb on the specification of the digits; returns its seconds."""
    options = [*flags, *(part for setting in settings for part in ("--set", setting))]
    words = [sys.executable, "-m", "ensemblekit", verb, str(ROOT / "specs" / "digits.toml"), "--quiet", *options]
    started = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


ROWS_OF_SWEEPS: dict[str, Row] = {"together": together}
