"""Checkpoints inside an epoch, which of them are kept, and those of format 1."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from helpers.run_directory_children import checkpoint

from ensemblekit.core.errors import RunError
from ensemblekit.runs.checkpoints import Checkpoint, Checkpoints
from ensemblekit.runs.tensor_files import write_tensors


def at(epoch: int, step: int = 0) -> Checkpoint:
    whole = checkpoint(epoch)
    return Checkpoint(epoch, whole.tensors, {"at": [epoch, step]}, step)


def write_format_1(directory: Path, epoch: int, best: bool = False) -> None:
    """A checkpoint as version 0.1.0 wrote it."""
    stem = f"epoch-{epoch:06d}"
    tensors_sha256 = write_tensors(directory / f"{stem}.safetensors", at(epoch).tensors)
    state = json.dumps(at(epoch).state).encode()
    (directory / f"{stem}.json").write_bytes(state)
    state_sha256 = hashlib.sha256(state).hexdigest()
    manifest = {"epoch": epoch, "best": best, "stem": stem}
    manifest |= {"tensors_sha256": tensors_sha256, "state_sha256": state_sha256}
    (directory / f"{stem}.manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


def saved(checkpoints: Checkpoints, *positions: tuple[int, int], best: tuple[int, int] | None = None) -> None:
    for position in positions:
        checkpoints.save(at(*position), best=position == best)


def flip(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def test_a_checkpoint_inside_an_epoch_is_newer_than_the_one_at_its_start_and_older_than_the_one_at_its_end(checkpoints):
    saved(checkpoints, (3, 0), (3, 5))
    loaded = checkpoints.load()
    assert (loaded.epoch, loaded.step, loaded.state) == (3, 5, {"at": [3, 5]})
    assert (checkpoints.directory / "epoch-000003-step-000005.manifest.json").exists()
    saved(checkpoints, (3, 1000000))
    assert checkpoints.load().step == 1000000
    saved(checkpoints, (4, 0))
    assert (checkpoints.load().epoch, checkpoints.load().step) == (4, 0)


def test_a_checkpoint_inside_an_epoch_is_removed_by_the_next_one_and_two_usable_ones_are_always_kept(checkpoints):
    saved(checkpoints, (0, 0), (0, 5))
    assert checkpoints.positions == [(0, 0), (0, 5)]
    saved(checkpoints, (0, 9))
    assert checkpoints.positions == [(0, 0), (0, 9)]
    saved(checkpoints, (1, 0))
    assert checkpoints.positions == [(0, 0), (1, 0)]
    saved(checkpoints, (1, 5), (2, 0), (2, 5))
    assert checkpoints.positions == [(2, 0), (2, 5)]
    flip(checkpoints.directory / "epoch-000002.safetensors")
    flip(checkpoints.directory / "epoch-000002-step-000005.json")
    with pytest.raises(RunError, match="no usable checkpoint"):
        checkpoints.load()
    assert len(checkpoints.damage) == 2
    saved(checkpoints, (2, 6), (2, 9))
    assert checkpoints.positions == [(2, 6), (2, 9)]  # the one at the end of an epoch is damaged
    assert len(list(checkpoints.directory.iterdir())) == 6


def test_an_earlier_step_that_is_saved_again_makes_the_later_ones_void(checkpoints):
    saved(checkpoints, (1, 0), (1, 9), (1, 4))
    assert checkpoints.load().step == 4
    assert checkpoints.positions == [(1, 0), (1, 4)]


def test_the_best_checkpoint_is_kept_through_checkpoints_inside_epochs(checkpoints):
    saved(checkpoints, (1, 0), (2, 0), (2, 7), (3, 0), (3, 7), best=(1, 0))
    assert checkpoints.positions == [(1, 0), (3, 0), (3, 7)]
    assert checkpoints.load(best=True).epoch == 1
    assert checkpoints.load().position == (3, 7)


@pytest.mark.parametrize("suffix", ["safetensors", "json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_lost_best_checkpoint_is_an_error_that_names_it_and_no_other_takes_its_place(checkpoints, suffix, damage):
    saved(checkpoints, (1, 0), (2, 0), (3, 0), best=(1, 0))
    damage(checkpoints.directory / f"epoch-000001.{suffix}")
    for opened in (checkpoints, Checkpoints(checkpoints.directory)):
        with pytest.raises(RunError, match=r"the best checkpoint is lost.*epoch-000001") as caught:
            opened.load(best=True)
        assert caught.value.exit_code == 5
        saved(opened, (4, 0))  # saving goes on and does not forget which one was the best
        with pytest.raises(RunError, match=r"the best checkpoint is lost.*epoch-000001"):
            opened.load(best=True)


def test_the_best_one_is_not_guessed_when_the_newest_manifest_is_damaged(checkpoints):
    saved(checkpoints, (1, 0), (2, 0), (3, 0), best=(1, 0))
    flip(checkpoints.directory / "epoch-000003.manifest.json")
    with pytest.raises(RunError, match="best checkpoint is lost"):
        checkpoints.load(best=True)


def test_checkpoints_of_format_1_are_read_and_continued(checkpoints):
    for epoch in (1, 2, 3):
        write_format_1(checkpoints.directory, epoch, best=epoch == 1)
    assert checkpoints.load().epoch == 3
    assert checkpoints.load(best=True).epoch == 1
    opened = Checkpoints(checkpoints.directory)
    saved(opened, (3, 8), (4, 0))
    assert opened.positions == [(1, 0), (3, 0), (4, 0)]
    assert Checkpoints(checkpoints.directory).load(best=True).epoch == 1


@pytest.mark.parametrize("suffix", ["safetensors", "json", "manifest.json"])
def test_a_lost_best_checkpoint_of_format_1_is_an_error(checkpoints, suffix):
    for epoch in (1, 2, 3):
        write_format_1(checkpoints.directory, epoch, best=epoch == 1)
    flip(checkpoints.directory / f"epoch-000001.{suffix}")
    with pytest.raises(RunError, match=r"best checkpoint is lost.*epoch-000001"):
        checkpoints.load(best=True)


def test_a_manifest_whose_content_was_edited_is_damage_also_where_it_is_still_valid_json(checkpoints):
    saved(checkpoints, (1, 0), (2, 0), best=(2, 0))
    file = checkpoints.directory / "epoch-000002.manifest.json"
    whole = json.loads(file.read_text())
    for key, value in [("best", [1, 0]), ("best", None), ("metrics", [9, ""]), ("step", "0"), ("format_version", 1)]:
        file.write_text(json.dumps({**whole, key: value}))
        assert checkpoints.load().epoch == 1
        assert "epoch-000002.manifest.json" in checkpoints.damage[-1]
