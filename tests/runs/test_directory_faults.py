"""Run directories under fire: killed and racing processes, full disks, flipped bits, cut and random files."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.run_directory_children import ACTIONS, call_in_child, checkpoint, create, model

from ensemblekit.core.errors import EnsemblekitError, ResourceError, RunError
from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with epochs 1 to 3, of which the first is the best, and a model; it was killed after its row of epoch 4."""
    run = create(tmp_path / "run", "seed = 0\n", {"seed": 0})
    for epoch in (1, 2, 3):
        run.append_metrics({"epoch": epoch})
        run.save_checkpoint(checkpoint(epoch), best=epoch == 1)
    run.append_metrics({"epoch": 4})
    run.write_model(*model(1))
    return run


def is_whole(found: Checkpoint) -> bool:
    expected = checkpoint(found.epoch, len(found.tensors["weight"]))
    same = all(found.tensors[name].equal(tensor) for name, tensor in expected.tensors.items())
    return same and found.tensors.keys() == expected.tensors.keys() and found.state == expected.state


def epochs_on_disk(run: RunDirectory) -> set[int]:
    names = [file.name for file in (run.path / "checkpoints").iterdir()]
    assert not [name for name in names if not name.startswith("epoch-")]
    return {int(name[6:12]) for name in names}


def content(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_the_last_two_checkpoints_and_the_best_are_kept(run):
    assert epochs_on_disk(run) == {1, 2, 3}
    run.save_checkpoint(checkpoint(4))
    assert epochs_on_disk(run) == {1, 3, 4}
    assert run.load_checkpoint(best=True).epoch == 1
    run.save_checkpoint(checkpoint(5), best=True)
    assert epochs_on_disk(run) == {4, 5}
    assert run.load_checkpoint(best=True).epoch == run.load_checkpoint().epoch == 5
    assert is_whole(run.load_checkpoint())


def test_without_a_best_checkpoint_the_newest_takes_its_part(tmp_path):
    run = create(tmp_path, "", {})
    for epoch in (1, 2):
        run.save_checkpoint(checkpoint(epoch))
    assert run.load_checkpoint(best=True).epoch == 2


def test_a_checkpoint_saved_twice_is_the_later_one_and_stays_the_best(run):
    for number in range(4):
        again = Checkpoint(3, checkpoint(number).tensors, {"number": number})
        run.save_checkpoint(again, best=number == 0)
        assert run.load_checkpoint().state == {"number": number}
    assert run.load_checkpoint(best=True).state == {"number": 3}
    assert len(list((run.path / "checkpoints").iterdir())) == 2 * 3


def test_saving_an_earlier_epoch_makes_it_the_newest(run):
    run.save_checkpoint(checkpoint(2))
    assert run.load_checkpoint().epoch == 2
    assert epochs_on_disk(run) == {1, 2}


def test_a_state_that_json_cannot_hold_is_a_bug_and_writes_nothing(run):
    before = content(run.path)
    with pytest.raises(ValueError, match="JSON"):
        run.save_checkpoint(Checkpoint(4, {}, {"loss": float("inf")}))
    assert content(run.path) == before


def test_what_killed_writers_left_is_ignored_and_removed_by_the_next_save(run):
    for directory in (run.path, run.path / "checkpoints"):
        (directory / ".writing-torn").mkdir()
        (directory / ".writing-torn" / "epoch-000004.safetensors").write_bytes(b"half")
    (run.path / "checkpoints" / "epoch-000004.safetensors").write_bytes(b"half")
    (run.path / "checkpoints" / "notes.txt").write_text("somebody's own")
    assert run.load_checkpoint().epoch == 3
    run.save_checkpoint(checkpoint(5))
    assert not list(run.path.rglob(".writing-*"))
    assert not list(run.path.rglob("epoch-000004*"))
    assert (run.path / "checkpoints" / "notes.txt").exists()


def test_a_process_killed_at_any_file_event_leaves_the_old_or_the_new_and_nothing_torn(run, tmp_path, monkeypatch):
    actions = ["save", "save again", "model", "append", "truncate"]
    events = call_in_child(*(["kill_at_each_event", action, run.path, tmp_path / action] for action in actions))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # those who look at what is left need not wait
    least = {"save": 20, "save again": 20, "model": 10, "append": 2, "truncate": 4}
    for action, number in zip(actions, events, strict=True):
        assert number > least[action]
        copies = [RunDirectory.open(copy) for copy in sorted((tmp_path / action).iterdir())]
        seen = [outcome(copy, action) for copy in copies]
        old, new = seen[0], seen[-1]
        assert old != new
        steps = [old, "damaged", new] if action == "model" else [old, new]
        assert set(seen) <= set(steps)
        assert seen == sorted(seen, key=steps.index)  # what was committed stays so


def test_a_start_that_is_killed_at_any_file_event_is_taken_over_or_resumed(tmp_path, monkeypatch):
    (events,) = call_in_child(["kill_start_at_each_event", tmp_path / "starts"])
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    assert events > 25
    for path in (tmp_path / "starts" / f"{number:04d}" for number in range(1, events + 1)):
        if (path / "run.json").exists():
            opened = RunDirectory.open(path)
            opened.check_spec_unchanged()
            assert opened.has_saved_nothing or opened.load_checkpoint().epoch == 0
        if not (path / "checkpoints" / "epoch-000000.manifest.json").exists():
            again = create(path, "seed = 1\n", {"seed": 1})
            assert (again.environment, again.status) == ({"seed": 1}, "interrupted")
            assert again.has_saved_nothing


def outcome(run: RunDirectory, action: str) -> str:
    """What a killed process has left, as far as its action goes, once the next process has used it."""
    found = run.load_checkpoint()
    assert is_whole(found)
    best = run.load_checkpoint(best=True)
    assert is_whole(best)
    assert best.epoch == (4 if found.epoch == 4 else 1)
    epochs = [row["epoch"] for row in run.read_metrics()]
    model_number = "damaged"
    if error_of(RunDirectory.read_model, run) is None:
        tensors, metadata = run.read_model()
        assert tensors["weight"].tolist() == [metadata["number"]] * 50
        model_number = str(metadata["number"])
    run.save_checkpoint(checkpoint(5))
    assert run.load_checkpoint().epoch == 5
    assert epochs_on_disk(run) == {5, found.epoch, best.epoch}
    assert not list(run.path.rglob(".writing-*"))
    saved = f"epoch {found.epoch}, size {len(found.tensors['weight'])}"
    return {"model": model_number, "append": str(epochs), "truncate": str(epochs)}.get(action, saved)


def test_a_file_that_gets_too_large_for_the_disk_is_removed_and_what_was_there_stays(run):
    before = content(run.path)
    actions = [action for action in ACTIONS if action.startswith("large")]
    errors = call_in_child(*(["with_small_files", action, run.path, 20_000] for action in actions))
    for error in errors:
        assert error.startswith("disk full")
        assert str(run.path) in error
    assert content(run.path) == before


@pytest.mark.parametrize("action", ["save", "save again", "model", "append", "truncate"])
def test_a_disk_that_gets_full_at_any_write_loses_nothing(run, monkeypatch, action):
    before = content(run.path)
    for fatal in range(1, 100):
        fill_disk_at(fatal, monkeypatch)
        error = error_of(ACTIONS[action], run)
        monkeypatch.undo()
        if error is None:
            break
        assert isinstance(error, ResourceError)
        assert error.exit_code == 7
        assert "disk full" in str(error)
        assert content(run.path) == before
        assert not list(run.path.rglob(".writing-*"))
    assert fatal > 2


def error_of(action: Callable[[RunDirectory], Any], run: RunDirectory) -> EnsemblekitError | None:
    try:
        action(run)
    except EnsemblekitError as error:
        return error
    return None


def fill_disk_at(fatal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the n-th write is done, then the disk is full; each system call is a write."""
    writes = iter(range(1, 1000))
    write, fsync = os.write, os.fsync
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def filling_write(descriptor: int, data: bytes | memoryview) -> int:
        if next(writes) == fatal:
            write(descriptor, data[: len(data) // 2])
            raise full
        return write(descriptor, data)

    def filling_fsync(descriptor: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}") and next(writes) == fatal:
            raise full
        fsync(descriptor)

    monkeypatch.setattr(os, "write", filling_write)
    monkeypatch.setattr(os, "fsync", filling_fsync)


def flips(whole: bytes, number: int, seed: int) -> list[bytes]:
    generator = random.Random(seed)
    flipped = []
    for _ in range(number):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        flipped.append(bytes(damaged))
    return flipped


@pytest.mark.parametrize("suffix", ["safetensors", "json", "manifest.json"])
def test_a_cut_or_a_flipped_bit_is_never_silent_and_the_checkpoint_before_is_taken(run, suffix):
    file = run.path / "checkpoints" / f"epoch-000003.{suffix}"
    whole = file.read_bytes()
    cuts = [whole[: len(whole) * percent // 100] for percent in range(100)] + [whole[:-1], whole + b"\n"]
    for damaged in cuts + flips(whole, 300, seed=0):
        file.write_bytes(damaged)
        run.damage.clear()
        found = run.load_checkpoint()
        assert "checksum mismatch" in run.damage[0]
        assert "epoch-000003" in run.damage[0]
        assert found.epoch == 2
        assert is_whole(found)
    file.write_bytes(whole)
    assert run.load_checkpoint().epoch == 3


@pytest.mark.parametrize("suffix", ["safetensors", "json", "manifest.json"])
def test_a_damaged_best_checkpoint_is_never_silent(run, suffix):
    file = run.path / "checkpoints" / f"epoch-000001.{suffix}"
    for damaged in flips(file.read_bytes(), 30, seed=1):
        file.write_bytes(damaged)
        with pytest.raises(RunError, match=r"checksum mismatch.*epoch-000001"):
            run.load_checkpoint(best=True)


def test_a_missing_file_or_one_of_another_epoch_is_a_mismatch(run):
    directory = run.path / "checkpoints"
    (directory / "epoch-000003.json").unlink()
    assert run.load_checkpoint().epoch == 2
    assert "checksum mismatch" in run.damage.pop()
    for file in directory.glob("epoch-000002.*"):
        shutil.copy(file, directory / file.name.replace("2", "3"))
    assert run.load_checkpoint().epoch == 2
    assert "checksum mismatch" in run.damage.pop()


def test_a_damaged_checkpoint_does_not_count_among_the_last_two(run):
    file = run.path / "checkpoints" / "epoch-000003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert run.load_checkpoint().epoch == 2
    assert "checksum mismatch" in run.damage.pop()
    run.save_checkpoint(checkpoint(6))
    assert epochs_on_disk(run) == {1, 2, 6}


def test_when_every_checkpoint_is_bad_none_is_used_or_touched(run):
    for file in (run.path / "checkpoints").glob("*.safetensors"):
        file.write_bytes(flips(file.read_bytes(), 1, seed=2)[0])
    before = content(run.path)
    with pytest.raises(RunError, match="no usable checkpoint") as error:
        run.load_checkpoint()
    assert len(run.damage) == 3
    assert error.value.exit_code == 5
    assert content(run.path) == before


def test_a_run_that_has_not_saved_yet_has_no_usable_checkpoint(tmp_path):
    with pytest.raises(RunError, match="no usable checkpoint"):
        create(tmp_path, "", {}).load_checkpoint()


def test_a_locked_run_names_its_owner_and_is_free_again_afterwards(run):
    with run.lock():
        with pytest.raises(RunError, match=f"in use by pid {os.getpid()}") as caught, run.lock():
            pass
        assert caught.value.exit_code == 5
    with run.lock():
        pass


def test_one_of_many_racing_processes_gets_the_lock_and_the_others_name_it(run, tmp_path):
    (run.path / ".lock").write_text("4194305\n")  # stale: beyond the largest pid
    before = content(run.path / "checkpoints")
    takeover, *races = call_in_child(
        ["kill_an_owner_with_a_worker", run.path],
        *[["race", run.path, 20]] * 2,
        ["race_to_create", tmp_path / "new", 20],
        ["race_without_a_name", tmp_path / "unnamed", 4],
    )
    owner, said = takeover
    assert said == "taken over"
    *races, created, names = races
    assert names == ["digits-1", "digits-2", "digits-3", "digits-4"]
    for answers in races:
        (winner,) = answers["winner"]
        assert winner != owner
        assert answers["loser"] == [winner] * 19
    assert created == 1
    new = RunDirectory.open(tmp_path / "new")
    assert (new.path / "spec.toml").read_text() == f"seed = {new.environment['number']}\n"
    new.check_spec_unchanged()
    assert content(run.path / "checkpoints") == before


READERS: list[Callable[[RunDirectory], Any]] = [
    lambda run: RunDirectory.open(run.path),
    lambda run: (run.status, run.error, run.checkpoint_epochs),
    RunDirectory.check_spec_unchanged,
    lambda run: run.environment,
    RunDirectory.read_metrics,
    RunDirectory.load_checkpoint,
    lambda run: run.load_checkpoint(best=True),
    RunDirectory.read_model,
    RunDirectory.read_result,
]
WRITERS: list[Callable[[RunDirectory], Any]] = [
    lambda run: run.lock().__enter__(),
    lambda run: run.append_metrics({"epoch": 5}),
    lambda run: run.truncate_metrics(3),
    lambda run: run.update_environment(device="cpu"),
    lambda run: run.save_checkpoint(checkpoint(4)),
    lambda run: run.write_model(*model(2)),
    lambda run: create(run.path, "", {}),
]


def corrupted(whole: bytes, generator: random.Random) -> bytes:
    """Random bytes, a random cut, random changes, other JSON, or a number or a bracket too many."""
    place = generator.randrange(len(whole) + 1)
    some = generator.randbytes(generator.randrange(1, 20))
    inserted = generator.choice([b"9" * 5000, b"[" * 5000, b'"\\ud800"', b"null", b"1e999", b"\n", b"\0", b"{}", some])
    return generator.choice(
        [
            some,
            b"",
            whole[:place],
            whole[:place] + some + whole[place + len(some) :],
            whole[:place] + inserted + whole[place:],
            generator.choice([b"null", b"[]", b"{}", b'{"format_version": []}', b'{"a": 1}\n', b"\xff\xfe", inserted]),
        ]
    )


def test_random_damage_to_any_file_raises_nothing_but_errors_for_people(run):
    run.write_result({"number": 1})
    generator = random.Random(0)
    whole = content(run.path)
    raised = 0
    for case in range(400):
        name = generator.choice(sorted(whole))
        (run.path / name).write_bytes(corrupted(whole[name], generator))
        for action in READERS if case % 6 else generator.sample(WRITERS, 2):
            raised += error_of(action, run) is not None
        if case % 6:
            (run.path / name).write_bytes(whole[name])
        else:
            shutil.rmtree(run.path)
            for path, data in whole.items():
                (run.path / path).parent.mkdir(parents=True, exist_ok=True)
                (run.path / path).write_bytes(data)
    assert raised > 100
