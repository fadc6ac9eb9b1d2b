"""Kills training at random moments, over all methods and engines, and resumes it: every result must be bit-identical.

``python tests/campaigns/kills.py --count 200 --seed 0``

Each trial trains a small spec and kills the process (SIGKILL) at a random moment: a quarter of the kills fall into the
first tenth of a run, a quarter into its last tenth. Then the user's way out is taken: `resume`, or `train` where there
is no run yet; some of these are killed as well. Weights, metrics of each epoch and result are compared with those of a
run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.plain_methods import plain_methods

from campaigns.forked import Outcome, run

ENGINES = ("sequential", "threaded", "stacked")
VARIANTS: dict[str, str] = {
    **{name: f'"{name}"' for name in plain_methods()},
    "gncl exact": '{name = "gncl", mode = "exact", lambda = 0.1}',
    "boosting stagewise": '{name = "boosting", schedule = "stagewise"}',
    "snapshot": '{name = "snapshot", at_epochs = [2, 4]}',
    "snapshot cyclic": '{name = "snapshot", cycles = 3}',
    "fast_geometric": '{name = "fast_geometric", cycles = 3}',
    "bagging and gncl": '["bagging", "gncl"]',
}
SPEC = """\
seed = 3
method = {method}
data = {{ name = "digits", limit_train = 300, limit_test = 60, augment = ["crop"], padding = 1 }}
model = {{ name = "mlp", hidden = [24], dropout = 0.2 }}
ensemble.members = 3
training = {{ epochs = 6, batch_size = 16, keep = "{keep}", checkpoint_every_minutes = 0.001 }}
engine = {{ name = "{engine}", device = "cpu" }}
"""
TIMES = {"seconds", "milliseconds_per_1000", "samples_per_second", "notices", "sha256", "history"}
"""Keys that depend on the time, or on the checksum of rows that have times, or say that a run was resumed."""
MAX_ATTEMPTS = 20


@dataclass(frozen=True)
class Combination:
    """A method on an engine."""

    variant: str
    engine: str

    def spec(self) -> str:
        keep = "best" if self.variant in ("gncl", "bagging") else "last"
        return SPEC.format(method=VARIANTS[self.variant], engine=self.engine, keep=keep)


@dataclass(frozen=True)
class Undisturbed:
    """A run that was not killed."""

    content: tuple[Any, ...]
    seconds: float


def content(path: Path) -> tuple[Any, ...]:
    """Everything about a finished run that must not depend on kills."""
    weights = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((path / "result.json").read_text())
    return weights, [without_times(row) for row in rows], without_times(result)


def without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return value


def undisturbed(combination: Combination, folder: Path) -> Undisturbed | None:
    """Train to the end, twice if need be; None if the spec refuses this engine."""
    (folder / "spec.toml").write_text(combination.spec())
    outcome = run("train", "spec.toml", "--out", "whole", folder=folder)
    if outcome.exit_code:
        print(f"{combination}: left out: {outcome.last_line}", flush=True)
        return None
    return Undisturbed(content(folder / "whole"), outcome.seconds)


def moment(source: random.Random, seconds: float) -> float:
    share = source.choice([source.uniform(0, 0.1), source.uniform(0.9, 1.0), source.random(), source.random()])
    return share * seconds


def trial(source: random.Random, whole: Undisturbed, folder: Path, counts: Counter[str]) -> str:
    """Kill, resume, perhaps kill again; returns what is wrong, or an empty text."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    outcome = run("train", "spec.toml", "--out", "run", folder=folder, kill_after=moment(source, whole.seconds))
    counts[_state(folder / "run", outcome)] += 1
    for _ in range(MAX_ATTEMPTS):
        kill_after = moment(source, whole.seconds) if source.random() < 0.25 else None
        # with a run, `resume` must lead out; without one, `train`; half of the time also where a run has just begun
        has_run = (folder / "run" / "run.json").exists()
        has_checkpoint = any((folder / "run" / "checkpoints").glob("*.manifest.json"))
        again = not has_run or (not has_checkpoint and source.random() < 0.5)
        arguments = ("train", "spec.toml", "--out", "run") if again else ("resume", "run")
        outcome = run(*arguments, folder=folder, kill_after=kill_after)
        if outcome.exit_code == 0:
            break
        if outcome.exit_code != 137:
            return f"{' '.join(arguments)} gave {outcome.exit_code}: {outcome.last_line}"
        counts["killed again"] += 1
    else:
        return "never finished"
    return "" if content(folder / "run") == whole.content else "another result"


def _state(path: Path, outcome: Outcome) -> str:
    if outcome.exit_code == 0:
        return "ended before the kill"
    if (path / "result.json").exists():
        return "killed after the result"
    if any((path / "checkpoints").glob("*.manifest.json")):
        return "killed with a checkpoint"
    return "killed before the first checkpoint"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = random.Random(options.seed)
    combinations = [Combination(variant, engine) for variant in VARIANTS for engine in ENGINES]
    source.shuffle(combinations)
    counts: Counter[str] = Counter()
    wholes: dict[Combination, Undisturbed | None] = {}
    faults, done, number = [], 0, 0
    with tempfile.TemporaryDirectory() as home:
        while done < options.count:
            combination = combinations[number % len(combinations)]
            folder = Path(home, str(number % len(combinations)))
            number += 1
            folder.mkdir(exist_ok=True)
            if combination not in wholes:
                wholes[combination] = undisturbed(combination, folder)
            whole = wholes[combination]
            if whole is None:
                continue
            done += 1
            if fault := trial(source, whole, folder, counts):
                faults.append(f"{combination}: {fault}")
                print(faults[-1], flush=True)
            if done % 20 == 0:
                print(f"{done} of {options.count}: {len(faults)} faults, {dict(counts)}", flush=True)
    used = sum(whole is not None for whole in wholes.values())
    print(f"{done} kills over {used} combinations of method and engine: {len(faults)} faults; {dict(counts)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
