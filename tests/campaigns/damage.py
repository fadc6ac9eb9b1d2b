"""Flips bits in every file of a run directory and uses the run: damage is reported, or changes nothing.

``python tests/campaigns/damage.py --count 300 --seed 0``

Each trial copies a finished or an interrupted run, flips one bit of one of its files (every file in turn), and asks
`evaluate`, `predict`, `resume` and `ek.open_run` for their numbers. A trial is silent, and a fault, if a command
succeeds with other numbers than those of the intact run and does not mention the damage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import ensemblekit as ek
from campaigns.forked import Outcome, run

SPEC = """\
seed = 3
data = { name = "digits", limit_train = 200, limit_test = 40, normalise = true }
model = { name = "mlp", hidden = [16] }
method = { name = "stacking" }
ensemble.members = 2
training = { epochs = 4, batch_size = 50, keep = "best" }
engine = { name = "sequential", device = "cpu" }
"""
DOCUMENTED = {0, 3, 4, 5, 6}
MENTIONS = ("damaged", "checksum", "differs", "note:", "rebuilt")


def numbers(path: Path, folder: Path) -> dict[str, Outcome]:
    """What a user gets from a run; `resume` last, because it may repair the run."""
    image = str(folder / "image.png")
    name = path.name
    return {
        "open": _opened(path, folder),
        "evaluate": run("evaluate", name, "--json", folder=folder),
        "predict": run("predict", name, image, "--json", folder=folder),
        "resume": run("resume", name, "--json", folder=folder),
        "evaluate again": run("evaluate", name, "--json", folder=folder),
    }


def _opened(path: Path, folder: Path) -> Outcome:
    """Everything that `ek.open_run` shows, computed in a child that may crash."""
    log = folder / ".opened"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            opened = ek.open_run(path)
            facts = [opened.status, opened.metrics, opened.members, opened.history, opened.environment, opened.error]
            log.write_text(json.dumps(facts))
            code = 0
        except ek.EnsemblekitError as error:
            log.write_text(error.line)
            code = error.exit_code
        except BaseException as error:
            log.write_text(f"unexpected: {error!r}")
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return Outcome(os.waitstatus_to_exitcode(status), log.read_text(), 0.0)


def damage(path: Path, file: str, source: random.Random) -> str:
    content = bytearray((path / file).read_bytes())
    position = source.randrange(len(content))
    content[position] ^= 1 << source.randrange(8)
    (path / file).write_bytes(bytes(content))
    return f"{file}, byte {position}"


def judge(before: dict[str, Outcome], after: dict[str, Outcome]) -> tuple[str, str]:
    """Return "detected", "without effect" or "fault", and the reason of a fault."""
    said = False
    for command, outcome in after.items():
        if outcome.exit_code not in DOCUMENTED:
            return "fault", f"{command} gave {outcome.exit_code}: {outcome.last_line}"
        mentioned = outcome.exit_code != 0 or any(word in outcome.output for word in MENTIONS)
        said = said or mentioned
        if not mentioned and _comparable(outcome) != _comparable(before[command]):
            return "fault", f"{command} silently gave something else"
    return ("detected" if said else "without effect"), ""


def _comparable(outcome: Outcome) -> object:
    """The numbers of an output without times, which differ from run to run."""
    try:
        value = json.loads(outcome.output)
    except ValueError:
        return outcome.output
    return {key: item for key, item in value.items() if "second" not in key} if isinstance(value, dict) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of flipped bits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = random.Random(options.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        intact = prepare(folder)
        files = {name: _files(folder / name) for name in intact}
        targets = [(name, file) for name in intact for file in files[name]]
        for number in range(options.count):
            name, file = targets[number % len(targets)]
            shutil.rmtree(folder / "run", ignore_errors=True)
            shutil.copytree(folder / name, folder / "run")
            where = damage(folder / "run", file, source)
            verdict, reason = judge(intact[name], numbers(folder / "run", folder))
            counts[verdict] += 1
            if verdict == "fault":
                print(f"{name} run, {where}: {reason}", flush=True)
    covered = min(options.count, len(targets))
    print(f"{options.count} flipped bits in {covered} of {len(targets)} files of two runs: {dict(counts)}")
    return 1 if counts["fault"] else 0


def prepare(folder: Path) -> dict[str, dict[str, Outcome]]:
    """Make a finished and an interrupted run and an image; returns what the intact runs give."""
    import numpy as np
    from PIL import Image

    (folder / "spec.toml").write_text(SPEC)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "image.png")
    assert run("train", "spec.toml", "--out", "finished", folder=folder).exit_code == 0
    shutil.copytree(folder / "finished", folder / "interrupted")
    for name in ("result.json", "model.json", "model.safetensors"):
        (folder / "interrupted" / name).unlink()
    intact = {}
    for name in ("finished", "interrupted"):
        shutil.copytree(folder / name, folder / "run")
        intact[name] = numbers(folder / "run", folder)
        shutil.rmtree(folder / "run")
    return intact


def _files(path: Path) -> list[str]:
    found = (file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size)
    return [str(file.relative_to(path)) for file in found]


if __name__ == "__main__":
    sys.exit(main())
