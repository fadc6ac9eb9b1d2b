"""Real signals and kills: what was saved stays, and a resumed run ends as if nothing had happened."""

from __future__ import annotations

import hashlib
import signal
import time
from pathlib import Path

import pytest
from click.testing import Result
from helpers import commands
from helpers.forked_commands import ForkedCommand

SPEC = """\
seed = 1
[data]
name = "digits"
limit_train = 400
limit_test = 100
augment = ["crop"]
padding = 1
[model]
name = "mlp"
hidden = [32]
dropout = 0.2
[ensemble]
members = 4
[method]
name = "gncl"
[training]
epochs = 40
batch_size = 32
[engine]
name = "sequential"
device = "cpu"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the spec and a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("interruption")
    (folder / "spec.toml").write_text(SPEC)
    done = commands.run("train", str(folder / "spec.toml"), "--out", str(folder / "whole"), "--quiet")
    assert done.exit_code == 0, done.stderr
    return folder


def start(folder: Path, name: str) -> ForkedCommand:
    return ForkedCommand(["train", "spec.toml", "--out", name], folder)


def wait_for_epoch(folder: Path, name: str, epoch: int, process: ForkedCommand) -> None:
    metrics = folder / name / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < epoch:
        assert process.is_running, process.stderr
        time.sleep(0.01)


def resume(folder: Path, name: str) -> Result:
    """Resume a run in this process, which is not the one that has started it."""
    return commands.run("resume", str(folder / name))


def weights(folder: Path, name: str) -> str:
    return hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_saves_stops_and_says_how_to_go_on(place, number, code):
    name = f"stopped-{code}"
    process = start(place, name)
    wait_for_epoch(place, name, 3, process)
    process.send_signal(number)
    assert process.wait() == code
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("error: saved at epoch ")
    assert f"ensemblekit resume {name}" in last
    assert "Traceback" not in process.stderr
    assert "resumed from epoch" in resume(place, name).stdout
    assert weights(place, name) == weights(place, "whole")


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.031])
def test_a_run_that_was_killed_ends_with_the_same_weights(place, delay):
    """kill -9 at no particular moment, twice in one run: in a step, in an evaluation or in a save."""
    name = f"killed-{delay}"
    process = start(place, name)
    wait_for_epoch(place, name, 5, process)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    output = resume(place, name).stdout
    assert "resumed from epoch" in output
    assert weights(place, name) == weights(place, "whole")


def test_a_run_in_use_is_left_alone(place):
    process = start(place, "busy")
    wait_for_epoch(place, "busy", 1, process)
    process.send_signal(signal.SIGSTOP)  # else it may be over before the other has started
    second = resume(place, "busy")
    process.send_signal(signal.SIGCONT)
    assert second.exit_code == 5
    assert f"in use by pid {process.pid}" in second.stderr
    assert process.wait() == 0
    assert weights(place, "busy") == weights(place, "whole")
