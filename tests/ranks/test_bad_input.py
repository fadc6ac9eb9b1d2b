"""Ranks that do not fit together, or cannot train: all of them end, with one line."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import last_error, run
from helpers.faulty_ranks import Launch, run_ranks

from ensemblekit.core.registry import discover
from ensemblekit.data.loading import load_data
from ensemblekit.ranks import session
from ensemblekit.training import cooperation

pytestmark = pytest.mark.faults
SPEC = """\
data = { name = "table", path = "table.csv", target = "kind", test_fraction = 0.5, validation_fraction = 0 }
model = { name = "mlp", hidden = [3] }
ensemble.members = 2
training = { epochs = 2, batch_size = 8 }
engine = { name = "sequential", device = "cpu" }
"""
RANDOM_MODEL = '''
import torch
from torch import nn
from ensemblekit import Model


class NoisyLinear(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.flatten(1)) * torch.rand(1, device=inputs.device)


class Noisy(Model):
    """Multiplies its outputs by a random number."""

    def build(self, input_shape, num_outputs):
        return NoisyLinear(input_shape[0], num_outputs)
'''
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


def write_table(path: Path, last: int) -> None:
    rows = [f"{index},{index * index % 7},{'ab'[index % 2]}" for index in range(40)]
    path.write_text("\n".join(["width,height,kind", *rows, f"{last},1,a"]))


@pytest.fixture(scope="module", autouse=True)
def table_imports(tmp_path_factory) -> None:
    """Import here what ranks would import for a table."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    write_table(path, 1)
    load_data(discover().get("dataset", "table").load()(path=path, target="kind"), seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    write_table(tmp_path / "table.csv", 1)
    return tmp_path


def on_second(change: Callable[[], object]) -> Callable[[int], None]:
    """Change something in the second rank."""
    return lambda rank: change() and None if rank == 1 else None


def assert_all_end(launch: Launch, code: int, *parts: str) -> None:
    """All ranks end with a code, and one line says why."""
    assert launch.codes == [code, code], launch.logs
    (line,) = launch.errors
    assert [part for part in parts if part not in line] == [], line


def test_a_rank_with_another_spec_is_named(folder):
    arguments = ["train", "spec.toml", "--out", "run", "--quiet"]
    launch = run_ranks(lambda rank: [*arguments, *["--set", "training.epochs=3"] * rank], 2, folder)
    assert_all_end(launch, 7, "error: rank 1 has another spec than rank 0", "training.epochs is 3 and 2")
    assert not (folder / "run" / "result.json").exists()


def test_a_rank_with_another_version_is_named(folder):
    change = on_second(lambda: setattr(cooperation, "version", lambda name: "0.0.9"))
    launch = run_ranks(["train", "spec.toml", "--out", "run"], 2, folder, change)
    assert_all_end(launch, 7, "error: rank 1 has another ensemblekit than rank 0: 0.0.9 and ")


def test_a_rank_with_another_data_file_is_named(folder):
    (folder / "elsewhere").mkdir()
    shutil.copy(folder / "spec.toml", folder / "elsewhere")
    write_table(folder / "elsewhere" / "table.csv", 2)
    change = on_second(lambda: os.chdir(folder / "elsewhere"))
    launch = run_ranks(["train", "spec.toml", "--out", str(folder / "run")], 2, folder, change)
    assert_all_end(launch, 7, "error: rank 1 has another data than rank 0")


def test_a_rank_with_other_devices_is_named(folder):
    change = on_second(lambda: setattr(session, "_backend", lambda: "cpu:gloo,cuda:nccl"))
    launch = run_ranks(["train", "spec.toml", "--out", "run"], 2, folder, change)
    assert_all_end(launch, 7, "rank 1", "by cpu:gloo,cuda:nccl", "by gloo", "CUDA_VISIBLE_DEVICES")


def test_gpus_that_are_not_there_are_reported_once(folder):
    launch = run_ranks(["train", "spec.toml", "--out", "run", "--device", "cuda"], 2, folder)
    assert_all_end(launch, 2, 'device "cuda" is not available here')


def test_a_file_that_only_one_rank_lacks_is_reported_once(folder):
    launch = run_ranks(lambda rank: ["train", ["spec.toml", "absent.toml"][rank]], 2, folder)
    assert_all_end(launch, 2, "absent.toml")


def hide(path: Path) -> None:
    """Let this process see an empty directory in the place of another."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, None) == 0
    cooperation.SHARED_SECONDS = 0.1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a directory")
def test_a_run_directory_that_ranks_do_not_share_is_refused(folder):
    (folder / "runs").mkdir()
    arguments = ["train", str(folder / "spec.toml"), "--out", str(folder / "runs" / "run")]
    launch = run_ranks(arguments, 2, folder, on_second(lambda: hide(folder / "runs")))
    assert_all_end(launch, 7, "error: rank 1 does not see the run directory that rank 0 writes", "storage")


def test_ranks_that_resume_copies_of_a_run_are_refused(folder):
    arguments = ["train", "spec.toml", "--out", "0", "--set", "training.epochs=1", "--quiet"]
    assert run_ranks(arguments, 1, folder).codes == [0]
    shutil.copytree(folder / "0", folder / "1")
    change = on_second(lambda: setattr(cooperation, "SHARED_SECONDS", 0.1))
    launch = run_ranks(lambda rank: ["resume", str(rank), "--epochs", "2"], 2, folder, change)
    assert_all_end(launch, 7, "rank 1")
    assert run_ranks(["resume", "0", "--quiet"], 2, folder).codes == [0, 0]


def test_a_model_that_uses_the_global_random_generator_is_refused(folder):
    (folder / "noisy.py").write_text(RANDOM_MODEL)
    arguments = ["train", "spec.toml", "--out", "run", "--plugin", "noisy.py", "--set", 'model={name="noisy"}']
    launch = run_ranks(arguments, 2, folder)
    assert_all_end(launch, 2, 'model "noisy" uses torch\'s global random generator', "in one process")
    assert run_ranks([*arguments, "--quiet"], 1, folder).codes == [0]


@pytest.mark.parametrize("arguments", [("evaluate", "run"), ("bench",), ("list",)])
def test_only_training_uses_several_ranks(arguments, monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "torchrun has started 2 processes, but only train and resume use several" in last_error(result)
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (2, "")


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is two, which is no number"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK is 2, but WORLD_SIZE is 2",
        ),
    ],
)
def test_half_an_environment_of_torchrun_is_refused(environment, what, folder, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run("train", str(folder / "spec.toml"), "--out", str(folder / "run"))
    assert result.exit_code == 2
    assert last_error(result) == f"error: {what}; environment; start all processes with torchrun, or unset WORLD_SIZE"
    assert not (folder / "run").exists()


def test_an_option_that_does_not_exist_is_reported_once(folder):
    launch = run_ranks(["train", "spec.toml", "--epochs", "3"], 2, folder)
    assert_all_end(launch, 2, "--epochs")
