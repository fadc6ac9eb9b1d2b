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
import torch
import torch.distributed as dist
from helpers.faulty_ranks import MOMENTS, Launch, end_soon, run_ranks

from ensemblekit import api
from ensemblekit.core.errors import ResourceError
from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.ranks.healing import HealingGroup
from ensemblekit.ranks.journal import CHECKPOINT_TENSORS, FACTS, ROWS, SAVED, TENSORS, Entry, Journal, pack, unpack
from ensemblekit.ranks.supervisor import wants_journal

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
MORE_MOMENTS: dict[str, tuple[Any, str]] = {**MOMENTS, "collecting": (dist, "send")}


@dataclass(frozen=True)
class Kill:
    """A rank is killed when its process comes to a moment for the so manieth time."""

    rank: int
    number: int
    moment: str = "step"
    process: int = 0
    """Which process of the rank: the first, or one that has replaced it."""

    def install(self, own: int) -> None:
        owner, name = MORE_MOMENTS[self.moment]
        original, calls = getattr(owner, name), 0

        def faulty(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
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


def train_with_kills(folder: Path, method: str, kills: Sequence[Kill], ends_soon: bool = False) -> Launch:
    def prepare(rank: int) -> None:
        if ends_soon:
            end_soon()
        count_processes(folder, rank)
        for kill in kills:
            kill.install(rank)

    return run_ranks(["train", str(write_spec(folder, method)), "--out", "run", "--quiet"], 3, folder, prepare)


def hashes(run: Path) -> dict[str, str]:
    files = [run / "model.safetensors", run / "outputs.safetensors", *(run / "checkpoints").glob("*.safetensors")]
    return {path.name.replace("-again", ""): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def count_processes(folder: Path, rank: int) -> None:
    original = SequentialEngine.train_step

    def counted(*arguments: Any, **options: Any) -> Any:
        (folder / f"worker-{rank}-{os.getpid()}").touch()
        return original(*arguments, **options)

    SequentialEngine.train_step = counted


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
    "while a checkpoint is collected": ("gncl", [Kill(1, 2, "collecting")], [1, 2, 1]),
    "rank 0 while it writes a checkpoint": ("gncl", [Kill(0, 17, "writing")], [2, 1, 1]),
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


def test_all_ranks_end_if_one_is_killed_before_the_first_checkpoint(tmp_path: Path) -> None:
    launch = train_with_kills(tmp_path, "gncl", [Kill(2, 1, "start")], ends_soon=True)
    assert launch.codes == [7, 7, 7], "\n".join(launch.logs)
    assert len(launch.errors) == 1
    assert "rank 2" in launch.errors[0]


def test_entries_of_a_journal_survive_their_way_to_another_rank() -> None:
    entries = {
        4: Entry(ROWS, torch.rand(3, 2)),
        5: Entry(FACTS, [{"step": 1}, None]),
        6: Entry(TENSORS, {"weight": torch.rand(2), "count": torch.tensor(3)}),
        7: Entry(CHECKPOINT_TENSORS, {"weight": torch.rand(2)}),
        8: Entry(SAVED, [1, 0]),
    }
    received = unpack(pack(entries))
    assert [(number, entry.kind) for number, entry in received.items()] == [(n, e.kind) for n, e in entries.items()]
    torch.testing.assert_close(received[4].value, entries[4].value, rtol=0, atol=0)
    torch.testing.assert_close(received[6].value, entries[6].value, rtol=0, atol=0)
    assert (received[5].value, received[8].value) == (entries[5].value, entries[8].value)
    assert received[7].value == {}  # only rank 0 needs them, and the others still have them


def test_a_journal_forgets_what_was_before_a_checkpoint_but_the_last_exchange() -> None:
    journal = Journal()
    for number in range(5):
        journal.number = number
        journal.add(FACTS, [])
    journal.start(5, (1, 0))
    assert sorted(journal.entries) == [4, 5]
    assert (journal.begin, journal.end, journal.position) == (6, 6, (1, 0))


@pytest.mark.parametrize(
    ("rows", "message"), [([[1.0], [9.0]], "other outputs"), (None, "exchanges facts where it was")]
)
def test_a_replacement_that_does_something_else_than_before_is_an_error(rows: Any, message: str) -> None:
    group = HealingGroup.__new__(HealingGroup)
    group.rank, group.size, group.journal, group.replaced = 1, 2, Journal(), []
    group.journal.add(ROWS, torch.tensor([[0.0], [1.0], [2.0]]))
    with pytest.raises(ResourceError, match=message):
        group.gather_json(None) if rows is None else group.gather_rows(torch.tensor(rows), [1, 2])


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("[engine]\njournal = true", [], True),
        ("engine = { journal = true }", ["engine.journal=false"], False),
        ("", ["engine.journal = false", "engine.journal = true"], True),
        ("engine = 3", [], False),
        ("[engine", [], False),
    ],
)
def test_the_journal_is_asked_for_by_the_spec_or_an_option(
    text: str, options: list[str], expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "spec.toml").write_text(text)
    assert wants_journal(tmp_path / "spec.toml", options) is expected
    assert wants_journal(tmp_path / "missing.toml", options) is (expected and bool(options))
