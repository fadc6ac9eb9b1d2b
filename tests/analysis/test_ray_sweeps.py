"""Sweeps on Ray: lost processes, failing runs, interruption, and the check of nodes; with a real local Ray."""

from __future__ import annotations

import builtins
import json
import os
import platform
import signal
import time
from pathlib import Path

import pytest
from helpers.sweeps import BASE, PLUGINS, final_metrics, statuses, sweep

import ensemblekit as ek
from ensemblekit.analysis.ray_cluster import RayCluster, RayShare, connected, share_of
from ensemblekit.analysis.ray_tasks import TOKEN, check_node, checksums
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.core.errors import Interrupted, ResourceError, RunError, UsageError
from ensemblekit.runs.locking import is_locked, locked

PATIENT = '''
import os
import time
from pathlib import Path
from ensemblekit import Method, hookimpl

PARENT = os.getppid()

class Patient(Method):
    """Trains independently, but waits for a file before each epoch after the second, or fails."""
    gate: str
    fails: bool = False

    @hookimpl
    def epoch_started(self, epoch):
        if self.fails:
            raise ValueError("broken on purpose")
        while epoch > 2 and not Path(f"{self.gate}{epoch}").exists():
            time.sleep(0.05)
            if os.getppid() != PARENT:  # the task was killed: soon there is a signal to stop, which the first step sees
                time.sleep(1)
                break
'''
KILLED, FAILING = "killed,seed=0", "failing,seed=0"


@pytest.fixture(scope="module")
def local_ray():
    """A Ray with two CPUs on this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            pytest.skip(f"Ray cannot start here: {error}")
        yield ray
        ray.shutdown()


@pytest.fixture
def patient(tmp_path) -> dict:
    """Options of a sweep whose runs wait for the file `gate` before their third epoch."""
    file = tmp_path / "patient.py"
    file.write_text(PATIENT)
    gate = {"name": "patient", "gate": str(tmp_path / "gate")}
    spec = {**BASE, "method": gate, "training": {**BASE["training"], "epochs": 4}}
    return {"spec": spec, "plugins": [*PLUGINS, str(file)]}


class Killer(SweepListener):
    """Kills the task of a run after its second epoch, and the training itself after the third."""

    def __init__(self, out: Path, gate: Path) -> None:
        self.run, self.gate = out / "runs" / KILLED, gate
        self.begun: list[int] = []
        """When the directory of the run was begun, read at each kill."""
        self.notes: list[str] = []

    def epoch_finished(self, name, epoch, num_epochs, metrics):
        if name != KILLED or epoch != 2 + len(self.begun) or epoch > 3:
            return
        training = int((self.run / ".lock").read_text())
        status = Path(f"/proc/{training}/status").read_text()
        task = int(status.partition("PPid:")[2].split()[0])
        self.begun.append((self.run / "spec.toml").stat().st_mtime_ns)
        os.kill(task if epoch == 2 else training, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_locked(self.run / ".lock") and time.monotonic() < deadline:
            time.sleep(0.05)  # a training process ends by itself once its task is gone
        Path(f"{self.gate}{epoch + 1}").touch()

    def notice(self, text):
        self.notes.append(text)


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_whose_processes_are_killed_is_bit_identical_and_a_failing_run_is_listed(tmp_path, local_ray, patient):
    out, whole = tmp_path / "s", tmp_path / "whole"
    variants = [{"name": "killed"}, {"name": "failing", "set": {"method.fails": True}}]
    killer = Killer(out, tmp_path / "gate")
    found = sweep(out, **patient, variants=variants, on="ray", progress=killer)
    assert [(run.name, run.status) for run in found.runs] == [(KILLED, "finished"), (FAILING, "failed")]
    assert "broken on purpose" in found.runs[1].error
    first, second = (note for note in killer.notes if f"{KILLED}: lost" in note)
    assert "WorkerCrashedError" in first
    assert "killed by SIGKILL" in second
    sweep(whole, **patient, variants=variants)
    assert final_metrics(out) == final_metrics(whole)
    file = Path("runs", KILLED, "model.safetensors")
    assert (out / file).read_bytes() == (whole / file).read_bytes()
    begun = (out / "runs" / KILLED / "spec.toml").stat().st_mtime_ns
    assert killer.begun == [begun, begun]  # resumed twice, and never begun anew
    assert not list(out.glob(".writing-*"))


@pytest.mark.slow
@pytest.mark.faults
def test_an_interrupted_sweep_saves_its_runs_and_continues_elsewhere(tmp_path, local_ray):
    class Stop(SweepListener):
        def epoch_finished(self, name, epoch, num_epochs, metrics):
            raise KeyboardInterrupt

    options = {"grid": {"method.lambda": [0, 0.5]}, "overrides": {"training.epochs": 400}}
    out = tmp_path / "s"
    with pytest.raises(Interrupted) as error:
        sweep(out, **options, on="ray", jobs=1, cpus_per_run=2, progress=Stop())
    assert error.value.what == "0 of 2 runs are finished"
    assert error.value.fix.endswith("--on ray --cpus-per-run 2")
    assert statuses(out) == ["interrupted", "planned"]
    environment = ek.open_run(out / "runs" / "lambda=0,seed=0", plugins=PLUGINS).environment
    assert environment["cores"] == min(2, os.cpu_count() or 1)
    with pytest.raises(Interrupted):
        sweep(out, **options, progress=Stop())  # without Ray
    assert ek.open_sweep(out).runs[0].epochs > 1


def test_a_node_that_does_not_share_the_directory_is_named(tmp_path, local_ray):
    (tmp_path / "s").mkdir()
    with connected() as cluster:
        assert not cluster.is_own
        shared = cluster.shared(tmp_path / "s", tmp_path / "s" / ".lock", [])
        with pytest.raises(RunError) as error, shared:
            pass
    assert f"node {platform.node()} (" in error.value.what
    assert "does not see the lock" in error.value.what
    assert list((tmp_path / "s").iterdir()) == []


def test_a_node_checks_its_directory_version_and_plugin_files(tmp_path):
    lock, plugin = tmp_path / ".lock", tmp_path / "plugin.py"
    plugin.write_text("")
    (tmp_path / TOKEN).write_text("secret")
    good = {
        "token": str(tmp_path),
        "secret": "secret",
        "answer": "node",
        "lock": str(lock),
        "plugins": checksums([str(plugin)]),
        "version": ek.__version__,
    }

    def answer(**changes) -> str:
        return check_node(json.dumps({**good, **changes}))

    with locked(lock):
        assert answer() == ""
        assert (tmp_path / "node").read_text() == "secret"
        assert "does not see the sweep directory (No such file" in answer(token=str(tmp_path / "elsewhere"))
        assert "another directory" in answer(secret="other")
        assert "it has ensemblekit" in answer(version="0.0.1")
        assert "cannot write" in answer(answer="no/node")
        plugin.write_text("changed = 1")
        assert f"plugin file {plugin} is another one" in answer()
        plugin.unlink()
        assert f"cannot read the plugin file {plugin}" in answer()


class OneNode:
    """Stands in for the module ray, with one node."""

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]


def test_a_run_gets_a_gpu_where_there_is_one_unless_its_spec_says_cpu():
    cluster = RayCluster(OneNode(), is_own=True)
    assert [cluster.gpus_of(RayShare(), device) for device in ("auto", "cuda", "cpu")] == [1, 1, 0]
    assert cluster.gpus_of(RayShare(gpus=0.5), "cpu") == 0.5
    assert cluster.room_problem(8, 2) == ""
    assert "no node of Ray has 9 CPUs and 1 GPUs; the largest have 8 CPUs and 2 GPUs" in cluster.room_problem(9, 1)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"on": "spark"}, 'cannot run on "spark"'),
        ({"cpus_per_run": 2}, "only runs on Ray"),
        ({"gpus_per_run": 1}, "only runs on Ray"),
        ({"on": "ray", "cpus_per_run": 0}, "0 is not a number of CPUs"),
        ({"on": "ray", "gpus_per_run": 1.5}, "1.5 is not a number of GPUs"),
        ({"on": "ray", "gpus_per_run": float("nan")}, "nan is not a number of GPUs"),
        ({"on": "ray", "search": {"method.lambda": "0..1"}}, "one trial at a time"),
    ],
)
def test_what_ray_cannot_run_is_refused_before_anything_is_written(tmp_path, options, part):
    with pytest.raises(UsageError, match=part):
        sweep(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("address", "kind", "part"),
    [
        ("ray://host:10001", UsageError, "Ray Client"),
        ("127.0.0.1:1", ResourceError, "Connection refused"),  # nothing listens there
    ],
)
def test_an_address_without_a_usable_cluster_is_refused(monkeypatch, address, kind, part):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(kind, match=part) as error, connected():
        pass
    assert error.value.where == f"RAY_ADDRESS={address}"


def test_without_ray_the_error_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def without_ray(name, *arguments, **options):
        if name == "ray":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(UsageError) as error:
        share_of("ray", None, None)
    assert error.value.fix == "pip install 'ensemblekit[ray]'"
