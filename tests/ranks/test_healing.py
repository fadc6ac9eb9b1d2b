"""A rank that is killed is started again alone and catches up; the result is that of an undisturbed run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ensemblekit import api
from helpers.faulty_ranks import MOMENTS, Launch, run_ranks

SPEC = """
seed = 3
data = {{ name = "digits" }}
model = {{ name = "mlp", hidden = [16] }}
ensemble = {{ members = 3 }}
method = {{ {method} }}
training = {{ epochs = 2, batch_size = 256 }}
engine = {{ name = "sequential", device = "cpu", journal = true }}
"""
METHODS = {"gncl": 'name = "gncl", lambda = 0.5', "bagging": 'name = "bagging"'}
MORE_MOMENTS: dict[str, tuple[Any, str]] = {**MOMENTS, "exchange": (dist, "all_gather")}


@dataclass(frozen=True)
class Kill:
    """A rank is killed when its process comes to a moment for the so manieth time."""

    rank: int
    number: int
    moment: str = "step"
    process: int = 0
    """Which process of the rank: the first, or one that has replaced it."""

    def install(self, folder: Path, own: int) -> None:
        owner, name = MORE_MOMENTS[self.moment]
        original, calls = getattr(owner, name), 0

        def faulty(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            (folder / f"worker-{own}-{os.getpid()}").touch()
            calls += 1
            process = int(os.environ.get("ENSEMBLEKIT_REPLACEMENTS", "0"))
            if (own, process, calls) == (self.rank, self.process, self.number):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, faulty)


def write_spec(folder: Path, method: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(SPEC.format(method=METHODS[method]))
    return path


def train_with_kills(folder: Path, method: str, kills: Sequence[Kill]) -> Launch:
    def prepare(rank: int) -> None:
        for kill in kills:
            kill.install(folder, rank)

    return run_ranks(["train", str(write_spec(folder, method)), "--out", "run", "--quiet"], 3, folder, prepare)


def hashes(run: Path) -> dict[str, str]:
    files = [run / "model.safetensors", run / "outputs.safetensors", *(run / "checkpoints").glob("*.safetensors")]
    return {path.name.replace("-again", ""): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def num_processes(folder: Path) -> list[int]:
    return [len(list(folder.glob(f"worker-{rank}-*"))) for rank in range(3)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The files of undisturbed runs in one process, by method."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {name: hashes(Path(api.train(write_spec(folder, name), folder / name).path)) for name in METHODS}


CASES = {
    "in the middle of an epoch": ("gncl", [Kill(1, 9)], [1, 2, 1]),
    "separable": ("bagging", [Kill(2, 4)], [1, 1, 2]),
    "twice": ("gncl", [Kill(2, 3), Kill(2, 6, process=1)], [1, 1, 3]),
    "two ranks": ("gncl", [Kill(2, 3), Kill(1, 4)], [1, 2, 2]),
    "rank 0": ("gncl", [Kill(0, 10)], [2, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_rank_is_replaced_and_the_result_is_bit_identical(
    case: str, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    method, kills, processes = CASES[case]
    launch = train_with_kills(tmp_path, method, kills)
    assert launch.codes == [0, 0, 0], "\n".join(launch.logs)
    assert num_processes(tmp_path) == processes
    assert hashes(tmp_path / "run") == undisturbed[method]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
