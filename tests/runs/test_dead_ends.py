"""From whatever state of a run directory there is a way on, which the error names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import last_error
from helpers.commands import run as command
from helpers.run_directory_children import checkpoint, create
from helpers.tiny_runs import content, train, train_until

import ensemblekit as ek
from ensemblekit.core.errors import RunError
from ensemblekit.runs.directory import RunDirectory


def flip(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "trained"
    train(path)
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "stopped"
    train_until(path, 3)
    return path


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def unfinished(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "unfinished"))


@pytest.mark.parametrize(
    "names", [["model.safetensors"], ["model.json"], ["result.json"], ["model.json", "result.json"]]
)
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_outputs_of_a_finished_run_are_rebuilt_from_the_checkpoints_bit_for_bit(finished, trained, names, damage):
    for name in names:
        damage(finished / name)
    if "result.json" not in names:
        result = command("evaluate", str(finished))
        assert result.exit_code == 5
        assert names[0] in last_error(result)
        assert f"ensemblekit resume {finished} rebuilds it" in last_error(result)
    else:
        with pytest.raises(RunError, match=r"(?s)result\.json.*ensemblekit resume .* rebuilds it"):
            ek.open_run(finished)
    rebuilt, original = ek.resume(finished, progress=False), ek.open_run(trained)
    assert all(any(name in text and "rebuilt" in text for text in rebuilt.notices) for name in names)
    assert (rebuilt.metrics, rebuilt.members) == (original.metrics, original.members)
    assert rebuilt.history == original.history
    assert (finished / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert (finished / "model.json").read_bytes() == (trained / "model.json").read_bytes()
    assert ek.evaluate_run(finished) == ek.evaluate_run(trained)


def test_a_finished_run_without_damage_is_not_touched_by_resume(finished):
    before = content(finished)
    ek.resume(finished, progress=False)
    assert content(finished) == before


def test_a_finished_run_that_cannot_be_rebuilt_keeps_what_it_has(finished):
    (finished / "model.json").unlink()
    for file in (finished / "checkpoints").glob("*.safetensors"):
        flip(file)
    before = content(finished)
    with pytest.raises(RunError, match="no usable checkpoint"):
        ek.resume(finished, progress=False)
    assert content(finished) == before


@pytest.mark.parametrize("suffix", ["safetensors", "json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_run_whose_best_checkpoint_is_lost_ends_with_an_error_and_no_result(diverging, tmp_path, suffix, damage):
    path = Path(shutil.copytree(diverging, tmp_path / "run"))
    damage(path / "checkpoints" / f"epoch-000001.{suffix}")
    result = command("resume", str(path))
    assert result.exit_code == 5
    assert "the best checkpoint is lost" in last_error(result)
    assert "epoch-000001" in last_error(result)
    assert not (path / "result.json").exists()
    assert RunDirectory.open(path).status == "failed"
    assert RunDirectory.open(path).load_checkpoint().epoch == 4


@pytest.fixture(scope="module")
def diverging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first epoch is the best, stopped after its third."""
    path = tmp_path_factory.mktemp("runs") / "diverging"
    train_until(path, 4, epochs=4, optimizer={"name": "sgd", "lr": 1000.0})
    assert RunDirectory.open(path).checkpoint_epochs == [1, 2, 3]
    return path


def test_a_run_that_was_killed_before_its_first_checkpoint_is_resumed_from_its_beginning(tmp_path, trained, unfinished):
    remove_checkpoints(unfinished)
    (unfinished / "metrics.jsonl").unlink()
    again = ek.resume(unfinished, progress=False)
    assert again.metrics == ek.open_run(trained).metrics
    assert (unfinished / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_a_run_that_was_killed_before_its_first_checkpoint_is_taken_over_by_train(unfinished, trained):
    remove_checkpoints(unfinished)
    (unfinished / "metrics.jsonl").unlink()
    (unfinished / "checkpoints" / ".writing-torn").mkdir()
    (unfinished / "checkpoints" / "epoch-000000.safetensors").write_bytes(b"half")
    assert train(unfinished).metrics == ek.open_run(trained).metrics


def remove_checkpoints(run: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        file.unlink()


LEFTOVERS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda run: None,
    "checkpoints": lambda run: (run / "checkpoints").mkdir(),
    "spec": lambda run: ((run / "checkpoints").mkdir(), (run / "spec.toml").write_text("seed = 0\n")),
    "a torn file": lambda run: ((run / "checkpoints").mkdir(), (run / ".writing-torn").mkdir()),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_a_directory_in_which_a_run_was_killed_while_it_started_is_taken_over(tmp_path, name):
    path = tmp_path / "run"
    path.mkdir()
    (path / ".lock").write_text("4194305\n")
    LEFTOVERS[name](path)
    result = command("resume", str(path))
    assert result.exit_code == 5
    assert "nothing was saved here yet" in last_error(result)
    assert f"ensemblekit train SPEC --out {path}" in last_error(result)
    run = create(path, "seed = 1\n")
    assert (path / "spec.toml").read_text() == "seed = 1\n"
    assert RunDirectory.open(path).environment == run.environment
    assert not list(path.glob(".writing-*"))


def test_a_run_without_run_json_says_so_and_can_be_trained_again_elsewhere(unfinished, trained, tmp_path):
    (unfinished / "run.json").unlink()
    before = content(unfinished)
    result = command("resume", str(unfinished))
    assert result.exit_code == 5
    assert "run.json is missing" in last_error(result)
    assert f"ensemblekit train {unfinished / 'spec.toml'} --out OTHER" in last_error(result)
    assert content(unfinished) == before
    again = ek.train(unfinished / "spec.toml", tmp_path / "other", progress=False)
    assert again.metrics == ek.open_run(trained).metrics


VALUABLE: dict[str, Callable[[RunDirectory], Any]] = {
    "a checkpoint": lambda run: run.save_checkpoint(checkpoint(0)),
    "metrics": lambda run: run.append_metrics({"epoch": 1}),
    "a result": lambda run: run.write_result({}),
    "a file of somebody else": lambda run: (run.path / "notes.txt").write_text("mine"),
    "a file of somebody else among the checkpoints": lambda run: (run.path / "checkpoints" / "x").write_text("mine"),
    "an edited spec": lambda run: (run.path / "spec.toml").write_text("seed = 2\n"),
    "a damaged record": lambda run: flip(run.path / "run.json"),
}


@pytest.mark.parametrize("name", VALUABLE)
def test_a_directory_with_anything_of_value_is_not_taken_over(tmp_path, name):
    run = create(tmp_path / "run", "seed = 0\n")
    VALUABLE[name](run)
    before = content(run.path)
    with pytest.raises(RunError, match="a run already exists here"):
        create(run.path, "seed = 1\n")
    assert content(run.path) == before


def test_a_start_that_fails_leaves_what_it_would_have_taken_over(tmp_path):
    path = create(tmp_path / "run", "seed = 0\n").path
    before = content(path)
    with pytest.raises(ZeroDivisionError), RunDirectory.claim(path):
        1 / 0  # noqa: B018
    assert content(path).keys() == before.keys()
    RunDirectory.open(path).check_spec_unchanged()


def test_a_run_whose_checkpoints_were_deleted_is_not_started_again_silently(unfinished):
    remove_checkpoints(unfinished)
    with pytest.raises(RunError, match="no usable checkpoint"):
        ek.resume(unfinished, progress=False)


def test_damaged_metrics_of_an_unfinished_run_stop_it_until_they_are_restored_or_deleted(unfinished, trained):
    file = unfinished / "metrics.jsonl"
    whole = file.read_bytes()
    flip(file)
    before = content(unfinished)
    result = command("resume", str(unfinished))
    assert result.exit_code == 5
    assert "restore the file, or delete it and resume the run" in last_error(result)
    assert content(unfinished) == before
    file.unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing: it holds the metrics of 2 epochs"):
        ek.open_run(unfinished)
    shutil.copytree(unfinished, unfinished.with_name("copy"))
    resumed, original = ek.resume(unfinished, progress=False), ek.open_run(trained)
    assert resumed.metrics == original.metrics
    assert [row["epoch"] for row in resumed.history] == [3]
    assert any("the metrics of 2 epochs are lost" in text for text in resumed.notices)
    restored = unfinished.with_name("copy")
    (restored / "metrics.jsonl").write_bytes(whole)
    assert len(ek.resume(restored, progress=False).history) == 3


def test_deleted_metrics_and_environment_of_a_finished_run_are_named_and_resume_goes_on_without_them(finished, trained):
    (finished / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing"):
        ek.open_run(finished)
    assert ek.evaluate_run(finished) == ek.evaluate_run(trained)  # it does not use them
    resumed = ek.resume(finished, progress=False)
    assert (resumed.history, resumed.metrics) == ([], ek.open_run(trained).metrics)
    (finished / "environment.json").unlink()
    for reader in (ek.open_run, ek.load, ek.evaluate_run):
        with pytest.raises(RunError, match=r"(?s)environment\.json is missing.*ensemblekit resume"):
            reader(finished)
    resumed = ek.resume(finished, progress=False)
    assert any("environment.json was missing" in text for text in resumed.notices)
    assert ek.evaluate_run(finished) == ek.evaluate_run(trained)


def test_a_missing_spec_is_written_again_by_resume(unfinished, finished, trained):
    for run in (unfinished, finished):
        (run / "spec.toml").unlink()
        with pytest.raises(RunError, match=r"(?s)spec\.toml is missing.*ensemblekit resume"):
            ek.open_run(run)
        assert ek.resume(run, progress=False).metrics == ek.open_run(trained).metrics
        assert (run / "spec.toml").read_bytes() == (trained / "spec.toml").read_bytes()


@pytest.mark.parametrize("verb", [ek.open_run, ek.load, ek.evaluate_run, lambda path: ek.resume(path, progress=False)])
def test_an_edited_spec_is_refused_by_every_verb_with_the_key_that_differs(finished, verb):
    file = finished / "spec.toml"
    text = file.read_text()
    file.write_text(text.replace('name = "gncl"', 'name = "smcl"'))
    with pytest.raises(RunError, match=r"the spec was changed: method\.") as caught:
        verb(finished)
    assert caught.value.exit_code == 5
    file.write_text("# a comment\n" + text)
    verb(finished)


def test_predict_refuses_an_edited_spec(finished, tmp_path):
    file = finished / "spec.toml"
    file.write_text(file.read_text().replace('name = "gncl"', 'name = "smcl"'))
    (tmp_path / "new.csv").write_text("1\n")
    result = command("predict", str(finished), str(tmp_path / "new.csv"))
    assert result.exit_code == 5
    assert "the spec was changed: method." in last_error(result)
