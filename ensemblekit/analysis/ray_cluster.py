"""A Ray cluster for a sweep: the connection, the share of each run, and the check that all nodes share a directory."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ensemblekit.analysis.ray_tasks import TOKEN, check_node, checksums
from ensemblekit.core.errors import Interrupted, ResourceError, RunError, UsageError, one_line
from ensemblekit.core.files import STAGING
from ensemblekit.runs.atomic import write_errors

ADDRESS, LOCAL = "RAY_ADDRESS", "local"
OBJECT_STORE_BYTES = 80 * 2**20
"""Memory for the objects of a local Ray, about the least that it takes: only short texts travel."""
CHECK_SECONDS = 60
"""Time that a node has to answer."""
CONNECT_SECONDS = 10
"""Time that the cluster has to answer."""


@dataclass(frozen=True)
class RayShare:
    """The share of a node that a run gets on Ray.

    Args:
        cpus: number of cores.
        gpus: number of GPUs, also a part of one; None: one if the cluster has any and the spec does not say "cpu".
    """

    cpus: int = 1
    gpus: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.cpus, bool) or not isinstance(self.cpus, int) or self.cpus < 1:
            raise UsageError(
                f"{self.cpus!r} is not a number of CPUs", "--cpus-per-run", "give an integer of at least 1"
            )
        number = 0 if self.gpus is None else self.gpus
        whole = isinstance(number, int | float) and (0 <= number <= 1 or (number > 1 and number == int(number)))
        if not whole or isinstance(number, bool):
            fix = "give an integer, or a number between 0 and 1 for a part of one"
            raise UsageError(f"{self.gpus!r} is not a number of GPUs", "--gpus-per-run", fix)

    @property
    def options(self) -> list[str]:
        """The options of the command line that say the same."""
        cpus = ["--cpus-per-run", str(self.cpus)] if self.cpus != 1 else []
        gpus = ["--gpus-per-run", f"{self.gpus:g}"] if self.gpus is not None else []
        return ["--on", "ray", *cpus, *gpus]


def share_of(on: str | None, cpus: int | None, gpus: float | None) -> RayShare | None:
    """Return the share of a run on Ray, or None for a sweep on this machine.

    Raises:
        UsageError: Ray is not installed, a share is impossible, or one is given without Ray.
    """
    if on is None:
        if cpus is not None or gpus is not None:
            name = "--cpus-per-run" if cpus is not None else "--gpus-per-run"
            raise UsageError("only runs on Ray have a share of their own", name, "add --on ray, or use --jobs")
        return None
    if on != "ray":
        raise UsageError(f'a sweep cannot run on "{on}"', "--on", "write --on ray, or leave it out")
    share = RayShare(1 if cpus is None else cpus, gpus)
    import_ray()
    return share


def import_ray() -> Any:
    """Import Ray; a `UsageError` names the extra if it is not installed."""
    try:
        import ray
    except ImportError as error:
        fix = "pip install 'ensemblekit[ray]'"
        raise UsageError("a sweep on a cluster needs Ray, which is not installed", "--on ray", fix) from error
    return ray


class RayCluster:
    """A connection to Ray.

    Args:
        ray: the module.
        is_own: whether this process has started it for the sweep.
    """

    def __init__(self, ray: Any, is_own: bool) -> None:
        self.ray, self.is_own = ray, is_own

    @property
    def nodes(self) -> list[Mapping[str, Any]]:
        """The living nodes, as Ray describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def gpus_of(self, share: RayShare, device: str) -> float:
        """Return the GPUs of a run whose spec names a device."""
        if share.gpus is not None:
            return share.gpus
        return 1 if device != "cpu" and self.has_gpus else 0

    @cached_property
    def has_gpus(self) -> bool:
        """Whether a node had a GPU when this was first asked."""
        return any(node["Resources"].get("GPU") for node in self.nodes)

    def room_problem(self, cpus: int, gpus: float) -> str:
        """Return why no node can train a run with such a share; empty if one can."""
        resources = [node["Resources"] for node in self.nodes]
        if any(found.get("CPU", 0) >= cpus and found.get("GPU", 0) >= gpus for found in resources):
            return ""
        most = {kind: max((found.get(kind, 0) for found in resources), default=0) for kind in ("CPU", "GPU")}
        return (
            f"no node of Ray has {cpus} CPUs and {gpus:g} GPUs; the largest have {most['CPU']:g} CPUs and "
            f"{most['GPU']:g} GPUs"
        )

    @contextmanager
    def shared(self, directory: Path, lock: Path, plugins: Sequence[str]) -> Iterator[dict[str, str]]:
        """Check that all nodes share a directory; yields the token by which later tasks check it again.

        Raises:
            RunError: a node does not see the directory, cannot write to it, or has other plugin files.
        """
        with write_errors(directory):
            holder = TemporaryDirectory(prefix=f"{STAGING}ray-", dir=directory, ignore_cleanup_errors=True)
        with holder as folder:
            token = {"token": folder, "secret": secrets.token_hex(16)}
            Path(folder, TOKEN).write_text(token["secret"])
            self._check_nodes({**token, "lock": str(lock), "plugins": checksums(plugins)}, directory)
            yield token

    def _check_nodes(self, request: Mapping[str, Any], directory: Path) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        import ensemblekit

        nodes, answers = self.nodes, {}
        for node in nodes:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = self.ray.remote(check_node).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            text = json.dumps({**request, "answer": node["NodeID"], "version": ensemblekit.__version__})
            answers[node["NodeID"]] = task.remote(text)
        self.ray.wait(list(answers.values()), num_returns=len(answers), timeout=CHECK_SECONDS)
        for node in nodes:
            problem = self._problem(answers[node["NodeID"]])
            if not problem and not _says(Path(request["token"], node["NodeID"]), request["secret"]):
                problem = "what it writes to the sweep directory is not seen here"
            if problem:
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                fix = "put it on storage that all nodes share, at the same path, and install the same packages on them"
                raise RunError(f"node {name} cannot train runs of this sweep: {problem}", str(directory), fix)

    def _problem(self, answer: Any) -> str:
        try:
            return str(self.ray.get(answer, timeout=0))
        except self.ray.exceptions.GetTimeoutError:
            return f"it has not answered within {CHECK_SECONDS} seconds"
        except self.ray.exceptions.RayError as error:
            return task_error(error)


def task_error(error: BaseException) -> str:
    """Return the first sentence of an error of a task, without the remote traceback."""
    cause = getattr(error, "cause", None) or error
    sentence = one_line(str(cause)).partition(". ")[0].rstrip(".")
    return f"{type(cause).__name__}: {sentence}"[:300]


@contextmanager
def connected() -> Iterator[RayCluster]:
    """Connect to Ray: the one that this process uses already, the cluster of RAY_ADDRESS, or else a local one.

    Raises:
        ResourceError: there is no cluster, or Ray does not start.
    """
    ray = import_ray()
    with _silence():
        if ray.is_initialized():
            yield RayCluster(ray, is_own=False)
            return
        address = os.environ.get(ADDRESS) or LOCAL
        _start(ray, address)
        try:
            yield RayCluster(ray, is_own=address == LOCAL)
        finally:
            ray.shutdown()


def _start(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        fix = "start the sweep on a node of the cluster, with RAY_ADDRESS=auto"
        raise UsageError("Ray Client does not pass on the progress of runs", f"{ADDRESS}={address}", fix)
    local: dict[str, Any] = {
        "include_dashboard": False,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    options = local if address == LOCAL else {}
    try:
        _check_reachable(address)
        with _own_signals(), _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        where = "--on ray" if address == LOCAL else f"{ADDRESS}={address}"
        fix = (
            "see the logs below /tmp/ray, or use --jobs"
            if address == LOCAL
            else "start the sweep on a node of a cluster"
        )
        raise ResourceError(f"Ray does not start: {one_line(str(error))[:300]}", where, fix) from error
    except SystemExit as error:  # Ray's handler of SIGTERM, which is in place while it starts
        raise Interrupted("", exit_code=128 + signal.SIGTERM) from error


def _check_reachable(address: str) -> None:
    """Raise an OSError if nothing answers at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put the handler of SIGTERM back in its place: that of Ray exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the time of a block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep Ray from printing the deaths of its processes to standard output, where the table or JSON is."""
    module: Any = sys.modules.get("ray._private.worker")
    if module is None or not hasattr(module, "print_to_stdstream"):
        yield
        return
    before = module.print_to_stdstream
    module.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        module.print_to_stdstream = before


def _says(file: Path, secret: str) -> bool:
    try:
        return file.read_text() == secret
    except OSError:
        return False
