"""No link inside a run directory is ever followed, neither to read nor to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.commands import last_error
from helpers.commands import run as command
from helpers.run_directory_children import checkpoint, create, model

from ensemblekit.core.errors import RunError
from ensemblekit.runs.calibration_file import write_calibration
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.locking import is_locked, locked
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.runs.own_files import FILES


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "run", "seed = 0\n")
    run.append_metrics({"epoch": 1})
    run.save_checkpoint(checkpoint(1))
    run.write_model(*model(1))
    kept = KeptOutputs(torch.zeros(2, 3, 4), torch.zeros(3).long(), torch.arange(3))
    run.write_result(run.write_outputs({"test": kept}))
    write_calibration(run.path, run.format_version, {})
    return run


def names() -> list[str]:
    inside = ["", ".safetensors", ".json", ".manifest.json"]
    return [*sorted(FILES), *(f"checkpoints/epoch-000001{suffix}" if suffix else "checkpoints" for suffix in inside)]


@pytest.mark.parametrize("name", names())
def test_a_link_in_place_of_any_file_is_refused_and_what_it_points_to_stays_as_it_is(run, tmp_path, name):
    outside = tmp_path / "outside"
    (run.path / name).rename(outside)
    (run.path / name).symlink_to(outside)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for verb in (["resume"], ["evaluate"], ["train", "digits", "--out"]):
        assert command(*verb, str(run.path)).exit_code == 5
    with pytest.raises(RunError, match="symbolic link") as caught:
        RunDirectory.open(run.path)
    assert name in caught.value.where
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_lock_does_not_truncate_what_a_link_points_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(RunError, match="symbolic link"), locked(tmp_path / ".lock"):
        pass
    assert not is_locked(tmp_path / ".lock")
    assert command("train", "digits", "--out", str(tmp_path)).exit_code == 5
    assert precious.read_text() == "content"


def test_metrics_are_not_appended_through_a_link_that_was_made_while_the_run_was_open(run, tmp_path):
    (run.path / "metrics.jsonl").rename(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    (run.path / "metrics.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="symbolic link"):
        run.append_metrics({"epoch": 2})
    assert (tmp_path / "outside").read_bytes() == before


def test_a_link_in_place_of_a_temporary_directory_is_refused_and_its_target_is_not_swept(run, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("content")
    (run.path / ".writing-link").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="symbolic link"):
        RunDirectory.open(run.path)
    run.save_checkpoint(checkpoint(2))  # sweeps
    assert (tmp_path / "outside" / "file").read_text() == "content"


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(run):
    (run.path / "metrics.jsonl").unlink()
    os.mkfifo(run.path / "metrics.jsonl")
    result = command("resume", str(run.path))
    assert result.exit_code == 5
    assert "expected a regular file" in last_error(result)


def test_the_run_directory_itself_may_be_reached_through_a_link_and_have_other_links_in_it(run, tmp_path):
    (tmp_path / "link").symlink_to(run.path)
    (run.path / "notes").symlink_to(tmp_path)
    opened = RunDirectory.open(tmp_path / "link")
    with opened.lock():
        opened.save_checkpoint(checkpoint(2))
    assert opened.load_checkpoint().epoch == 2
