"""A rank that fails ends all, with one line that names it, and the run goes on bit-identically.

More of the same, by a seed and over more methods, is in campaigns/ranks.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import faulty_ranks
from helpers.faulty_ranks import Fault, Launch, end_soon, happenings, run_ranks
from helpers.places import ROOT
from helpers.small_runs import assert_same_run

from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.ranks.watch import GRACE_SECONDS
from ensemblekit.runs.directory import RunDirectory

pytestmark = pytest.mark.faults
SPEC = """\
method = "{method}"
data = {{ name = "digits", limit_train = 100, limit_test = 40 }}
model = {{ name = "mlp", hidden = [8], dropout = 0.2 }}
ensemble.members = 3
training = {{ epochs = 3, batch_size = 20 }}
engine = {{ name = "sequential", device = "cpu", rank_timeout = 5.1 }}
"""
TRAIN = ["train", "spec.toml", "--out", "run", "--quiet"]
SECONDS_TO_END = 15


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run in one process, with its spec beside it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "spec.toml").write_text(SPEC.format(method="gncl"))
    assert run_ranks(TRAIN, 1, folder).codes == [0]
    return folder


@pytest.fixture
def folder(tmp_path, undisturbed) -> Path:
    (tmp_path / "spec.toml").write_text((undisturbed / "spec.toml").read_text())
    return tmp_path


def launch_with(fault: Fault, size: int, folder: Path) -> Launch:
    def prepare(rank: int) -> None:
        if rank == fault.rank:
            fault.install(folder, happenings(folder)[fault.kind])

    return run_ranks(TRAIN, size, folder, prepare)


@pytest.mark.parametrize(
    ("fault", "size", "resumed_on", "what"),
    [
        (Fault("kill", 1, "step", 8), 3, 2, "rank 1 (process "),
        (Fault("kill", 0, "writing", 12), 2, 1, "has ended without a word: it was killed or has crashed"),
        (Fault("hang", 1, "evaluation", 2), 2, 3, "timed out: no sign of life for 5 s"),
        (Fault("memory", 1, "saving", 3), 2, 4, "rank 1: out of memory"),
    ],
    ids=str,
)
def test_a_rank_that_fails_ends_all_and_the_run_goes_on(fault, size, resumed_on, what, folder, undisturbed):
    launch = launch_with(fault, size, folder)
    own = -signal.SIGKILL if fault.kind in ("kill", "hang") else 7
    assert launch.codes == [own if rank == fault.rank else 7 for rank in range(size)]
    assert launch.seconds_after_fault < SECONDS_TO_END
    (line,) = launch.errors
    assert f"error: rank {fault.rank}" in line
    assert what in line
    assert RunDirectory.open(folder / "run").load_checkpoint().epoch < 3
    assert run_ranks(["resume", "run", "--quiet"], resumed_on, folder).codes == [0] * resumed_on
    assert_same_run(folder / "run", undisturbed / "run")


def test_ranks_that_are_started_again_before_the_first_checkpoint_begin_anew(folder, undisturbed):
    launch = launch_with(Fault("kill", 1, "start"), 2, folder)
    assert launch.codes == [7, -9]
    assert launch.errors[0].endswith("nothing was saved yet: run the command again")
    assert run_ranks(TRAIN, 2, folder, restarts=1).codes == [0, 0]
    assert_same_run(folder / "run", undisturbed / "run")


def fail_to_write() -> None:
    with Path("/dev/full").open("w") as disk:
        disk.write("all of it")


def test_a_full_disk_ends_all_ranks(folder, undisturbed):
    def prepare(rank: int) -> None:
        if rank == 0:
            Fault("disk", 0, "writing", 14).install(folder, fail_to_write)

    launch = run_ranks(TRAIN, 2, folder, prepare)
    assert launch.codes == [7, 7]
    (line,) = launch.errors
    assert "error: rank 0: disk full" in line
    assert run_ranks(["resume", "run", "--quiet"], 2, folder).codes == [0, 0]
    assert_same_run(folder / "run", undisturbed / "run")


def test_a_rank_that_computes_for_long_ends_when_another_is_gone(folder):
    """It does not meet the other for long, and does not wait in an exchange that would fail."""

    def prepare(rank: int) -> None:
        end_soon()
        kind = "kill" if rank == 1 else "sleep"
        Fault(kind, rank, "step", 3).install(folder, {**happenings(), "sleep": lambda: time.sleep(60)}[kind])

    launch = run_ranks(TRAIN, 2, folder, prepare)
    assert launch.codes == [7, -9]
    assert launch.seconds + GRACE_SECONDS < SECONDS_TO_END
    (line,) = launch.errors
    assert "rank 1" in line


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start torchrun with two ranks."""
    search = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def test_torchrun_starts_failed_ranks_again_and_the_run_goes_on(folder, undisturbed):
    fault = ["kill", "1", "step", "8", str(folder)]
    process = torchrun(folder, "--max-restarts", "1", faulty_ranks.__file__, *fault, *TRAIN)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert "error: rank 1" in line
    assert_same_run(folder / "run", undisturbed / "run")


@pytest.mark.parametrize(("number", "resumed_on"), [(signal.SIGTERM, 3), (signal.SIGINT, 1)])
def test_ranks_that_are_asked_to_stop_save_at_the_same_step(number, resumed_on, folder, undisturbed):
    def prepare(rank: int) -> None:
        train_step = SequentialEngine.train_step

        def slow(*arguments, **options):
            time.sleep(0.2)  # ranks meet about once a second
            return train_step(*arguments, **options)

        SequentialEngine.train_step = slow
        if rank == 0:
            Fault("", 0, "step", 3).install(folder, lambda: None)

    def follow(processes) -> None:
        while not (folder / "fault").exists():
            time.sleep(0.02)
        for process in processes:  # as torchrun does if it is asked itself
            os.kill(process.pid, number)

    launch = run_ranks(TRAIN, 2, folder, prepare, follow=follow)
    assert launch.codes == [128 + number] * 2, launch.logs
    (line,) = launch.errors
    assert line.startswith("error: saved at ")
    assert RunDirectory.open(folder / "run").status == "interrupted"
    assert run_ranks(["resume", "run", "--quiet"], resumed_on, folder).codes == [0] * resumed_on
    assert_same_run(folder / "run", undisturbed / "run")
