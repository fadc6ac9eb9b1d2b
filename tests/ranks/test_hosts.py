"""Ranks on hosts of their own, with addresses of their own, started by a torchrun on each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import faulty_ranks
from helpers.faulty_ranks import Fault, end_soon, launch_store, run_ranks
from helpers.hosts import DEVICE, Hosts, reason_against_hosts
from helpers.places import ROOT
from helpers.small_runs import assert_same_run

from ensemblekit.ranks.watch import GRACE_SECONDS

REASON = reason_against_hosts()
pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.skipif(bool(REASON), reason=REASON)]
SPEC = """\
method = "gncl"
data = { name = "digits", limit_train = 100, limit_test = 40 }
model = { name = "mlp", hidden = [8] }
ensemble.members = 3
training = { epochs = 2, batch_size = 20 }
engine = { name = "sequential", device = "cpu", rank_timeout = 5.1 }
"""
TRAIN = ["train", "spec.toml", "--out", "run", "--quiet"]


@pytest.fixture
def alone(tmp_path) -> Path:
    """A folder with a spec, and with a run of it in one process."""
    (tmp_path / "spec.toml").write_text(SPEC)
    assert run_ranks(["train", "spec.toml", "--out", "alone", "--quiet"], 1, tmp_path).codes == [0]
    return tmp_path


def torchrun(hosts: Hosts, index: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start torchrun on a host, with one rank."""
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
    where = ["--rdzv-endpoint", f"{hosts.addresses[0]}:29500", "--local-addr", hosts.addresses[index]]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, *where, "--max-restarts", "1", *arguments]
    search = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    return subprocess.Popen(
        hosts.command(index, *command), cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


def test_two_hosts_with_a_slow_and_lossy_network_go_on_after_a_kill(alone):
    fault = ["kill", "1", "step", "7", str(alone)]
    with Hosts(2, delay=0.002, loss=0.005) as hosts:
        processes = [torchrun(hosts, index, alone, faulty_ranks.__file__, *fault, *TRAIN) for index in range(2)]
        logs = [process.communicate(timeout=100)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], logs
        assert hosts.dropped > 0
    (line,) = [line for log in logs for line in log.splitlines() if line.startswith("error:")]
    assert line.startswith("error: rank 1 (process ")  # by the host that is left
    assert_same_run(alone / "run", alone / "alone")


def test_a_host_that_is_cut_off_ends_and_so_do_the_others(alone):
    with Hosts(2) as hosts:

        def prepare(rank: int) -> None:
            end_soon()
            hosts.enter(rank)
            if rank == 1:
                Fault("cut", 1, "step", 7).install(alone, lambda: time.sleep(0.2))

        def cut(processes: object) -> None:
            while not (alone / "fault").exists():
                time.sleep(0.01)
            hosts.cut.add(hosts.addresses[1])

        def store_on_first_host(address: str):
            return hosts.run_in(0, lambda: launch_store(address))

        where = {"address": hosts.addresses[0], "make_store": store_on_first_host}
        launch = run_ranks(TRAIN, 2, alone, prepare, follow=cut, **where)
    assert launch.codes == [7, 7]
    assert launch.seconds_after_fault + GRACE_SECONDS < 5.1 + 15
    first, second = launch.errors  # one on each host
    assert "error: rank 1 (process " in first
    assert "on host1) timed out: no sign of life for 5 s" in first
    assert "on host1) is cut off from the others" in second
    assert run_ranks(["resume", "run", "--quiet"], 2, alone).codes == [0, 0]
    assert_same_run(alone / "run", alone / "alone")
