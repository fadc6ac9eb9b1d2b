"""Whatever happens to a file of a run: every verb says so, or gives exactly what it gave before.

ENSEMBLEKIT_FUZZED_RUNS is the number of damaged directories, if more are wanted than the suite tries.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mutations import mutated
from helpers.tiny_runs import content, train, train_until
from safetensors.torch import load_file

import ensemblekit as ek
from ensemblekit.core.errors import EnsemblekitError

CASES = int(os.environ.get("ENSEMBLEKIT_FUZZED_RUNS", "300"))
PARTS = 4
GOLDEN = Path(__file__).parent / "golden"


def opened(path: Path) -> Any:
    run = ek.open_run(path)
    return run.status, run.metrics, run.members, run.history, run.environment, run.error, run.notices


def outputs(path: Path) -> Any:
    with torch.no_grad():
        return ek.load(path)(torch.linspace(0, 1, 128).view(2, 1, 8, 8)).tolist()


def kept(path: Path) -> Any:
    run = ek.open_run(path)
    kept = [run.outputs(split) for split in ("test", "validation")]
    return [tensor.tolist() for part in kept for tensor in (part.outputs, part.targets, part.index)]


def resumed(path: Path) -> Any:
    run = ek.resume(path, progress=False)
    files = [path / "model.safetensors", path / "outputs.safetensors"]
    weights = {name: tensor.tolist() for file in files if file.exists() for name, tensor in load_file(file).items()}
    lost = any("are lost" in text for text in run.notices)  # said, so that it may differ
    epochs = [1, 2, 3] if lost else [row.get("epoch") for row in run.history]
    losses = None if lost else [row.get("validation_loss") for row in run.history]
    return run.status, run.metrics, run.members, weights, epochs, losses or "lost"


VERBS: dict[str, Callable[[Path], Any]] = {
    "open": opened,
    "load": outputs,
    "outputs": kept,
    "evaluate": ek.evaluate_run,
    "resume": resumed,
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "finished")
    train_until(folder / "unfinished", 3)
    return {name: content(folder / name) for name in ("finished", "unfinished")}


def restore(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def answer(verb: Callable[[Path], Any], path: Path) -> Any:
    try:
        return verb(path)
    except EnsemblekitError as error:
        is_documented = error.exit_code in (3, 4, 5) and error.fix
        return "refused" if is_documented else repr(error)


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_to_any_file_of_a_run_is_said_or_changes_nothing(originals, tmp_path, monkeypatch, part):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    expected = {}
    for kind, files in originals.items():
        for name, verb in VERBS.items():
            restore(tmp_path / "run", files)
            expected[kind, name] = answer(verb, tmp_path / "run")
    generator = random.Random(part)
    refused = 0
    for _ in range(CASES // PARTS):
        kind = generator.choice(list(originals))
        file = generator.choice([name for name in originals[kind] if name != ".lock"])
        damaged = mutated(originals[kind][file], generator)
        restore(tmp_path / "run", originals[kind])
        (tmp_path / "run" / file).unlink() if damaged is None else (tmp_path / "run" / file).write_bytes(damaged)
        for name, verb in VERBS.items():
            found = answer(verb, tmp_path / "run")
            refused += found == "refused"
            if found not in ("refused", expected[kind, name]) and not is_lost_history(found, expected[kind, name]):
                pytest.fail(f"{name} of a {kind} run with {file} changed to {str(damaged)[:2000]}: {found}")
    assert refused > CASES // PARTS // 4


def is_lost_history(found: Any, expected: Any) -> bool:
    """Whether a resumed run differs only in the metrics of past epochs, and says so."""
    return len(found) == 6 and found[-1] == "lost" and found[:4] == expected[:4]


@pytest.mark.parametrize("kind", ["finished", "interrupted"])
def test_damage_to_a_run_of_format_1_which_has_few_checksums_is_no_crash(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    files = content(GOLDEN / kind)
    generator = random.Random(0)
    edited = [name for name in files if name.endswith(("json", "jsonl", "toml"))]
    for _ in range(CASES // 10):
        file = generator.choice(edited)
        damaged = mutated(files[file], generator)
        restore(tmp_path / "run", files)
        (tmp_path / "run" / file).unlink() if damaged is None else (tmp_path / "run" / file).write_bytes(damaged)
        for name, verb in VERBS.items():
            found = answer(verb, tmp_path / "run")
            assert found == "refused" or not isinstance(found, str), (name, file, damaged, found)
