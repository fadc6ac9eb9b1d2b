"""Run directories: what they keep, what they refuse, and that nothing is half written."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_directory_children import checkpoint, create, model

from ensemblekit.core.errors import ResourceError, RunError
from ensemblekit.core.files import sha256_of_file
from ensemblekit.runs import directory as run_directory
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import write_json
from ensemblekit.runs.locking import locked
from ensemblekit.runs.record import FORMAT_VERSION

SPEC = 'seed = 0\n[model]\nname = "mlp"\nwidths = [8, 4]\n[training]\nlr = 0.1 # a comment\n'


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "runs" / "demo", SPEC, {"seed": 0, "device": "cpu"})


def content(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def edit_run_json(run: RunDirectory, **changes: Any) -> None:
    file = run.path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_new_run_can_be_opened_and_has_what_it_was_given(run):
    opened = RunDirectory.open(str(run.path))
    assert opened.path == run.path
    assert (run.path / "spec.toml").read_text() == SPEC
    assert opened.environment == {"seed": 0, "device": "cpu"}
    assert opened.read_metrics() == []
    assert opened.read_result() is None
    opened.check_spec_unchanged()
    assert json.loads((run.path / "run.json").read_text())["format_version"] == FORMAT_VERSION


def test_a_run_can_be_created_in_an_empty_directory(tmp_path):
    assert create(tmp_path, SPEC, {}).path == tmp_path


def test_an_existing_run_is_refused_and_stays_as_it_is(run):
    run.save_checkpoint(checkpoint(0))
    before = content(run.path)
    with pytest.raises(RunError, match=f"ensemblekit resume {run.path}") as caught:
        create(run.path, "seed = 1\n", {})
    assert caught.value.exit_code == 5
    assert str(run.path) in caught.value.where
    assert content(run.path) == before


def test_a_run_that_another_process_has_created_in_the_meantime_stays_as_it_is(tmp_path, monkeypatch):
    @contextmanager
    def locked_too_late(path: Path) -> Iterator[None]:
        monkeypatch.undo()
        create(path.parent, "seed = 1\n", {}).save_checkpoint(checkpoint(0))
        with locked(path):
            yield

    monkeypatch.setattr(run_directory, "locked", locked_too_late)
    with pytest.raises(RunError, match="ensemblekit resume"):
        create(tmp_path / "run", SPEC, {})
    RunDirectory.open(tmp_path / "run").check_spec_unchanged()
    assert (tmp_path / "run" / "spec.toml").read_text() == "seed = 1\n"


@pytest.mark.parametrize("kind", ["a directory with a file", "a file"])
def test_what_is_not_an_empty_directory_is_refused_and_stays_as_it_is(tmp_path, kind):
    place = tmp_path / "place"
    mine = place if kind == "a file" else place / "spec.toml"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(RunError, match="choose another --out"):
        create(place, SPEC, {})
    assert content(tmp_path) == {str(mine.relative_to(tmp_path)): b"mine"}


def test_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write") as caught:
        create(tmp_path / "file" / "run", SPEC, {})
    assert caught.value.exit_code == 5


def test_a_read_only_directory_cannot_be_written_and_nothing_is_left_in_it(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)  # the files themselves, as a quota by name would
        with pytest.raises(RunError, match="cannot write: Read-only file system"):
            create(tmp_path / "run", SPEC, {})
    assert list(tmp_path.iterdir()) == []
    create(tmp_path / "run", SPEC, {})


@pytest.mark.parametrize("path", ["nothing", "empty", "file", "file/below"])
def test_where_there_is_no_run_none_is_opened(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="not a run directory"):
        RunDirectory.open(tmp_path / path)


def test_a_run_of_a_newer_format_asks_for_an_upgrade_and_is_kept(run):
    edit_run_json(run, format_version=FORMAT_VERSION + 1, spec=["in", "another", "form"])
    before = content(run.path)
    with pytest.raises(RunError, match="upgrade ensemblekit") as caught:
        RunDirectory.open(run.path)
    assert caught.value.exit_code == 5
    assert content(run.path) == before


@pytest.mark.parametrize("version", [0, -1, None, "1", [1], 1.5])
def test_a_format_that_never_was_is_damage(run, version):
    edit_run_json(run, format_version=version)
    with pytest.raises(RunError, match="damaged"):
        RunDirectory.open(run.path)


def test_a_changed_spec_is_refused_with_every_key_that_differs(run):
    changed = SPEC.replace("0.1", "0.2").replace("8, 4", "8").replace("seed = 0", "seed = 0.0\nname = 'x'")
    (run.path / "spec.toml").write_text(changed)
    with pytest.raises(RunError) as caught:
        RunDirectory.open(run.path).check_spec_unchanged()
    changes = "seed: 0 → 0.0, model.widths.1: 4 → not set, training.lr: 0.1 → 0.2, name: not set → 'x'"
    assert caught.value.what == f"the spec was changed: {changes}"
    assert caught.value.exit_code == 5


def test_a_spec_with_another_layout_means_the_same_and_is_accepted(run):
    (run.path / "spec.toml").write_text(SPEC.replace(" # a comment", "").replace("[8, 4]", "[ 8,4 ]"))
    run.check_spec_unchanged()


@pytest.mark.parametrize("spec", [b"", b"seed = ", b"\xff", b"a = " + b"[" * 10_000])
def test_a_spec_that_was_ruined_is_refused(run, spec):
    (run.path / "spec.toml").write_bytes(spec)
    with pytest.raises(RunError):
        run.check_spec_unchanged()


def test_the_environment_can_be_added_to(run):
    run.update_environment(device="cuda", engine="stacked", seconds=float("inf"))
    assert run.environment == {"seed": 0, "device": "cuda", "engine": "stacked", "seconds": None}


def test_metrics_come_back_row_by_row_without_anything_that_is_not_json(run):
    run.append_metrics({"epoch": 1, "loss": 0.1 + 0.2, "members": [float("nan"), 1.0], "more": {"x": float("-inf")}})
    run.append_metrics({"epoch": 2, "loss": None})
    rows = [{"epoch": 1, "loss": 0.1 + 0.2, "members": [None, 1.0], "more": {"x": None}}, {"epoch": 2, "loss": None}]
    assert run.read_metrics() == rows
    text = (run.path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [{key: value for key, value in line.items() if key != "sha256"} for line in lines] == rows


def test_a_torn_last_row_does_not_count_and_the_next_one_takes_its_place(run):
    file = run.path / "metrics.jsonl"
    run.append_metrics({"epoch": 1})
    whole = file.read_bytes()
    for cut in range(1, len(whole)):
        file.write_bytes(whole + whole[:cut])
        assert run.read_metrics() == [{"epoch": 1}]
        run.append_metrics({"epoch": 2})
        assert run.read_metrics() == [{"epoch": 1}, {"epoch": 2}]


def test_a_damaged_row_is_named_by_its_line(run):
    run.append_metrics({"epoch": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"epo\n{"epoch": 3}\n')
    with pytest.raises(RunError, match="line 2"):
        run.read_metrics()


def test_rows_after_an_epoch_can_be_dropped(run):
    for epoch in (1, 2, 3):
        run.append_metrics({"epoch": epoch, "loss": 1 / epoch})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 4')
    run.truncate_metrics(2)
    assert run.read_metrics() == [{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}]
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_result_comes_back(run):
    run.write_result({"test_accuracy": 0.98, "test_loss": float("nan")})
    assert run.read_result() == {"test_accuracy": 0.98, "test_loss": None}


def test_a_model_comes_back_bit_for_bit_with_its_metadata(run):
    flat = torch.arange(12.0)
    tensors = {
        "first": flat[:6].view(2, 3), "second": flat[6:], "overlapping": flat[3:9], "the same": flat,
        "transposed": flat.view(3, 4).T, "expanded": torch.ones(1).expand(5), "empty": torch.zeros(0, 3),
        "also empty": torch.zeros(0), "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(7), "half": torch.rand(3).bfloat16(), "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]), "double": torch.rand(3, dtype=torch.float64),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]), "learnt": torch.nn.Parameter(torch.rand(2)),
    }  # fmt: skip
    run.write_model(tensors, {"classes": ["a", "b"]})
    loaded, metadata = RunDirectory.open(run.path).read_model()
    assert metadata == {"classes": ["a", "b"]}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert loaded["odd"][1].signbit()


def test_a_loaded_model_does_not_change_when_its_file_does(run):
    run.write_model(*model(1))
    tensors, _ = run.read_model()
    (run.path / "model.safetensors").write_bytes(b"")
    assert tensors["weight"].tolist() == [1] * 50


def test_a_run_without_a_model_has_not_finished(run):
    with pytest.raises(RunError, match=f"(?s)not finished.*ensemblekit resume {run.path}"):
        run.read_model()


def test_files_can_be_read_by_whoever_may_read_the_directory(run):
    run.write_model(*model(1))
    run.save_checkpoint(checkpoint(1))
    modes = {file.stat().st_mode for file in run.path.rglob("*") if file.is_file()}
    assert len(modes) == 1


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("vouched_for", [False, True])
@pytest.mark.parametrize("write", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))])
def test_a_pickle_in_place_of_the_weights_is_refused_and_not_run(run, tmp_path, write, vouched_for):
    run.write_model(*model(1))
    weights = run.path / "model.safetensors"
    write({"weight": Canary(tmp_path / "canary")}, weights)
    if vouched_for:
        record = {"format_version": 2, "weights_sha256": sha256_of_file(weights), "metadata": {}}
        write_json(run.path / "model.json", record)
    with pytest.raises(RunError, match="refused") as caught:
        run.read_model()
    assert caught.value.exit_code == 5
    assert not (tmp_path / "canary").exists()


def test_one_flipped_bit_of_the_weights_is_a_checksum_mismatch(run):
    run.write_model(*model(1))
    weights = run.path / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[-1] ^= 1
    weights.write_bytes(whole)
    with pytest.raises(RunError, match="checksum mismatch"):
        run.read_model()


def test_every_file_is_on_the_disk_before_its_name_and_the_names_before_the_one_that_vouches_for_them(run, monkeypatch):
    log: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        fsync(descriptor)
        log.append(("sync", os.fstat(descriptor).st_ino))

    def logged_replace(source: Path, target: Path) -> None:
        assert ("sync", source.stat().st_ino) in log
        replace(source, target)
        log.append((target.name, target.parent.stat().st_ino))

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    run.save_checkpoint(checkpoint(1))
    run.write_model(*model(1))
    run.write_result({})
    run.append_metrics({"epoch": 1})
    whats = [what for what, _ in log]
    for last in ("epoch-000001.manifest.json", "model.json", "result.json"):
        index = whats.index(last)
        assert log[index + 1] == ("sync", log[index][1])
        if last != "result.json":
            assert log[index - 1] == ("sync", log[index][1])
    others = ("epoch-000001.safetensors", "epoch-000001.json", "model.safetensors")
    assert [name for name in whats if name in others] == list(others)
    assert whats.index(others[1]) < whats.index("epoch-000001.manifest.json")
    assert whats.index(others[2]) < whats.index("model.json")
    assert log[-1] == ("sync", (run.path / "metrics.jsonl").stat().st_ino)


def test_a_disk_that_is_full_from_the_start_is_said_before_any_training(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(ResourceError, match="disk full") as caught:
        create(tmp_path / "run", SPEC, {})
    assert caught.value.exit_code == 7
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_claimed_and_not_used_is_gone_and_one_that_was_there_before_stays(tmp_path):
    with pytest.raises(ZeroDivisionError), RunDirectory.claim(tmp_path / "new"):
        1 / 0  # noqa: B018
    (tmp_path / "old").mkdir()
    with pytest.raises(ZeroDivisionError), RunDirectory.claim(tmp_path / "old"):
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_a_run_goes_to_the_first_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for taken in (1, 2, 4):
        Path("runs", f"digits-{taken}").mkdir(parents=True)
    with RunDirectory.claim_next("digits") as directory:
        assert directory.path == Path("runs/digits-3")


def test_runs_that_start_together_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory.claim_next("digits") as first, RunDirectory.claim_next("digits") as second:
        assert (first.path, second.path) == (Path("runs/digits-1"), Path("runs/digits-2"))
        second.begin(SPEC, {})
    assert [path.name for path in Path("runs").iterdir()] == ["digits-2"]


def test_the_status_of_a_run_says_how_far_it_is(run):
    assert RunDirectory.open(run.path).status == "interrupted"  # begun, and nobody works on it
    with run.lock():
        assert RunDirectory.open(run.path).status == "running"
    run.write_status("failed", "out of memory")
    opened = RunDirectory.open(run.path)
    assert (opened.status, opened.error) == ("failed", "out of memory")
    run.write_result({})
    assert (RunDirectory.open(run.path).status, RunDirectory.open(run.path).error) == ("finished", None)
