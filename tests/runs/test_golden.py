"""Run directories of version 0.1.0, one finished and one interrupted, stay readable and can be resumed.

golden/ was written by that version: two members of an mlp with gncl on 60 digits, 4 epochs; the interrupted run was
stopped in epoch 3, after its line of metrics and before its checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.commands import run as command
from helpers.tiny_runs import content
from PIL import Image
from safetensors.torch import load_file

import ensemblekit as ek
from ensemblekit.core.errors import RunError
from ensemblekit.runs.directory import RunDirectory

GOLDEN = Path(__file__).parent / "golden"
SAME = ("test_loss", "test_accuracy", "test_nll", "test_brier", "test_diversity")


@pytest.fixture(params=["finished", "interrupted"])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def recorded() -> dict[str, float]:
    return {name: json.loads((GOLDEN / "finished" / "result.json").read_text())["metrics"][name] for name in SAME}


def test_a_run_of_0_1_0_opens_and_is_not_changed_by_that(golden):
    before = content(golden)
    run = ek.open_run(golden)
    assert run.status == golden.name
    assert len(run.history) == (4 if golden.name == "finished" else 3)
    assert run.spec.methods[0].name == "gncl"
    assert run.environment["ensemblekit"] == "0.1.0"
    assert run.checkpoints == ([3, 4] if golden.name == "finished" else [1, 2])
    assert content(golden) == before


def test_a_finished_run_of_0_1_0_loads_evaluates_and_predicts(tmp_path):
    path = shutil.copytree(GOLDEN / "finished", tmp_path / "run")
    metrics = ek.evaluate_run(path)
    assert {name: metrics[name] for name in SAME} == pytest.approx(recorded(), rel=1e-5)
    assert {name: ek.open_run(path).metrics[name] for name in SAME} == recorded()
    image = Image.new("L", (8, 8), 100)
    image.save(tmp_path / "image.png")
    assert command("predict", str(path), str(tmp_path / "image.png")).exit_code == 0
    with torch.no_grad():
        assert ek.load(path)(torch.full((1, 1, 8, 8), 100 / 255)).shape == (1, 10)
    before = content(path)
    ek.resume(path, progress=False)
    assert content(path) == before


def test_an_interrupted_run_of_0_1_0_is_resumed_to_the_result_of_the_finished_one(tmp_path):
    path = Path(shutil.copytree(GOLDEN / "interrupted", tmp_path / "run"))
    run = ek.resume(path, progress=False)
    assert {name: run.metrics[name] for name in SAME} == pytest.approx(recorded(), rel=1e-5)
    assert [row["epoch"] for row in run.history] == [1, 2, 3, 4]
    weights, expected = load_file(path / "model.safetensors"), load_file(GOLDEN / "finished" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor)
    assert json.loads((path / "run.json").read_text())["format_version"] == 2
    assert "data" in run.environment
    again = ek.open_run(path)
    assert (again.metrics, again.history) == (run.metrics, run.history)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "result.json"])
def test_outputs_of_a_run_of_0_1_0_are_rebuilt(tmp_path, name):
    path = Path(shutil.copytree(GOLDEN / "finished", tmp_path / "run"))
    (path / name).write_bytes((path / name).read_bytes()[:-20])
    run = ek.resume(path, progress=False)
    assert {name: run.metrics[name] for name in SAME} == pytest.approx(recorded(), rel=1e-5)
    assert ek.evaluate_run(path)["test_loss"] == pytest.approx(recorded()["test_loss"], rel=1e-5)


def test_a_repaired_run_of_0_1_0_has_checksums_from_then_on(tmp_path):
    path = Path(shutil.copytree(GOLDEN / "finished", tmp_path / "run"))
    (path / "spec.toml").unlink()
    assert ek.resume(path, progress=False).metrics["test_loss"] == recorded()["test_loss"]
    directory = RunDirectory.open(path)
    assert directory.read_model()[1]["num_outputs"] == 10
    for name in ("result.json", "model.json", "environment.json", "metrics.jsonl"):
        file = path / name
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"1", b"2", 1))
        with pytest.raises(RunError, match="checksum mismatch"):
            ek.open_run(path).ensemble  # noqa: B018
        file.write_bytes(whole)


def test_a_run_of_0_1_0_is_trained_further(tmp_path):
    path = Path(shutil.copytree(GOLDEN / "finished", tmp_path / "run"))
    run = ek.resume(path, progress=False, epochs=6)
    assert [row["epoch"] for row in run.history] == [1, 2, 3, 4, 5, 6]
    assert run.metrics["test_loss"] < recorded()["test_loss"]
    assert ek.open_run(path).metrics == run.metrics


IMPOSSIBLE = [
    ("num_outputs", 10**30), ("num_outputs", 10**12), ("num_outputs", -1), ("num_outputs", True), ("num_outputs", 11),
    ("input_shape", [10**12]), ("input_shape", []), ("input_shape", [1, 8, 10**10]), ("input_shape", ["a"]),
    ("task", 5), ("classes", 5), ("members", [0, "x"]), ("transform", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_metadata_of_format_1_that_cannot_be_is_damage_and_no_crash(tmp_path, key, value):
    path = Path(shutil.copytree(GOLDEN / "finished", tmp_path / "run"))
    record = json.loads((path / "model.json").read_text())
    record["metadata"][key] = value
    (path / "model.json").write_text(json.dumps(record))
    with pytest.raises(RunError):
        ek.load(path)
