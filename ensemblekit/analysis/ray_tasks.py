"""The tasks of a sweep on Ray: they run in Ray's processes, on the nodes of the cluster.

Ray transports texts only: a task gets one JSON text and answers with such texts. The training itself is done by a
process of its own, the same as that of `--jobs N`; if a task is stopped or killed, that process saves and ends.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ensemblekit.analysis.sweep_process import Job, Worker
from ensemblekit.core.errors import one_line
from ensemblekit.core.files import sha256_of_file
from ensemblekit.runs.locking import is_locked

TOKEN = "token"
STOP_SECONDS = 0.5
"""Time after which a task that waits notices that Ray wants it to stop."""


def train_run(request: str) -> Iterator[str]:
    """Train or resume a run, and yield its events.

    Args:
        request: the JSON text of a table: `job` as in `Job`; `cpus` and `gpus`, its share of the node; `plugins`, local
            plugin files; `cwd`, the working directory of the sweep; `token`, the directory with the token of the sweep
            and `secret`, what it says.
    """
    task = json.loads(request)
    node = platform.node()
    yield json.dumps({"event": "run_started", "node": node})
    problem = unshared(task)
    if problem:  # a node that has joined the cluster after the start of the sweep
        yield json.dumps({"event": "ended", "status": "failed", "error": f"node {node}: {problem}"})
        return
    hidden = {} if task["gpus"] else {"CUDA_VISIBLE_DEVICES": ""}  # a run without a share takes no GPU from others
    cwd = task["cwd"] if os.path.isdir(task["cwd"]) else None
    worker = Worker(task["cpus"], (), task["plugins"], hidden, cwd)
    events: SimpleQueue[dict[str, Any]] = SimpleQueue()
    thread = threading.Thread(target=_follow, args=(worker, Job(**task["job"]), events), daemon=True)
    thread.start()
    try:
        for event in _until_end(events):
            yield json.dumps(event)
    finally:
        worker.stop()
        thread.join()  # until the run is saved
        worker.close()


def _follow(worker: Worker, job: Job, events: SimpleQueue[dict[str, Any]]) -> None:
    """Put all events of a run into a queue; the last one says how it ended."""
    try:
        end = worker.train(job, events.put)
    except Exception as error:  # the task waits for the end of the run
        end = {"event": "ended", "status": "failed", "error": one_line(f"{type(error).__name__}: {error}")}
    events.put(end)


def _until_end(events: SimpleQueue[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield events up to the one that ends the run."""
    while True:
        try:
            event = events.get(timeout=STOP_SECONDS)  # Ray cannot interrupt a thread that waits in the system
        except Empty:
            continue
        yield event
        if event["event"] == "ended":
            return


def check_node(request: str) -> str:
    """Check that a node can train runs of a sweep; returns the problem, or an empty text.

    Args:
        request: the JSON text of a table: `token` and `secret` as for `train_run`; `answer`, the name of the file in
            that directory to which the node writes the secret; `lock`, the lock file that the sweep holds; `plugins`,
            checksums of local plugin files by path; `version`, that of the sweep.
    """
    import ensemblekit

    task = json.loads(request)
    if ensemblekit.__version__ != task["version"]:
        return f"it has ensemblekit {ensemblekit.__version__}, the sweep {task['version']}"
    if problem := unshared(task):
        return problem
    try:
        Path(task["token"], task["answer"]).write_text(task["secret"])
    except OSError as error:
        return f"it cannot write to the sweep directory ({error.strerror or error})"
    if not is_locked(Path(task["lock"])):
        return "it does not see the lock of the sweep directory: the storage has no file locks between nodes"
    return _other_plugin(task["plugins"])


def unshared(task: Mapping[str, Any]) -> str:
    """Return why this node does not share the sweep directory; empty if it does."""
    try:
        seen = Path(task["token"], TOKEN).read_text()
    except OSError as error:
        return f"it does not see the sweep directory ({error.strerror or error})"
    return "" if seen == task["secret"] else "it sees another directory at the path of the sweep directory"


def checksums(files: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of files by path."""
    return {file: sha256_of_file(Path(file)) for file in files}


def _other_plugin(expected: Mapping[str, str]) -> str:
    for file, checksum in expected.items():
        try:
            if checksums([file])[file] != checksum:
                return f"its plugin file {file} is another one"
        except OSError as error:
            return f"it cannot read the plugin file {file} ({error.strerror or error})"
    return ""
