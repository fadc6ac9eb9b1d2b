"""The command serve: what it refuses, and that it drains as a real process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_runs
from helpers.commands import last_error, run
from helpers.image_files import pixels

import ensemblekit as ek
from ensemblekit.core.errors import Interrupted
from ensemblekit.export.service import SIGNALS, bind, is_loopback, serve, url_of
from ensemblekit.export.service_limits import Limits
from ensemblekit.export.service_queue import Batcher
from ensemblekit.export.service_state import Service

NUM_CLIENTS = 8
BODY = json.dumps([pixels(1, 8, 8)[None].tolist()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "run"
    tiny_runs.train(path, epochs=1)
    return path


def test_a_port_in_use_is_reported_before_the_run_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", str(tmp_path / "no run"), "--port", str(port))
    assert result.exit_code == 7
    assert f"error: the port is in use; 127.0.0.1, port {port}; stop the program" in last_error(result)


def test_a_host_that_is_not_of_this_machine_is_a_usage_error(tmp_path):
    for host in ("192.0.2.1", "not a host"):
        result = run("serve", str(tmp_path), "--host", host, "--port", "0")
        assert result.exit_code == 2, result.output
        assert host in last_error(result)


def test_only_addresses_of_the_machine_itself_go_without_a_warning(tmp_path):
    for host, alone, shown in [("127.0.0.1", True, "127.0.0.1"), ("0.0.0.0", False, "127.0.0.1")]:
        with bind(host, 0) as bound:
            assert is_loopback(bound) == alone
            assert url_of(bound) == f"http://{shown}:{bound.getsockname()[1]}"
    result = run("serve", str(tmp_path / "no run"), "--host", "0.0.0.0", "--port", "0")
    assert "warning: other machines can reach the service, and there is no authentication" in result.stderr
    assert result.exit_code == 5  # there is no run


def test_a_missing_package_is_named_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run("serve", str(tmp_path))
    assert result.exit_code == 2
    assert last_error(result).endswith("pip install 'ensemblekit[serve]'")


@pytest.mark.faults
def test_a_second_signal_ends_it_at_once_and_says_how_many_have_no_answer(trained, monkeypatch):
    entered, go = threading.Event(), threading.Event()
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def blocked(self: Batcher, jobs: Any) -> None:
        entered.set()
        go.wait(60)

    def ask(address: str) -> None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request("POST", "/predict", BODY, {"Content-Type": "application/json"})
            connection.getresponse()
        connection.close()

    def stop() -> None:
        assert entered.wait(30)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # signals that come together are one

    monkeypatch.setattr(Batcher, "_answer", blocked)
    service = Service(ek.open_run(trained), ek.load(trained), Limits())
    with bind("127.0.0.1", 0) as bound:
        threads = [
            threading.Thread(target=ask, args=(url_of(bound).removeprefix("http://"),)),
            threading.Thread(target=stop),
        ]
        with pytest.raises(Interrupted, match="stopped with 1 unanswered request") as stopped:
            serve(service, bound, 60, lambda: [thread.start() for thread in threads])
    assert stopped.value.exit_code == 143
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    go.set()
    for thread in threads:
        thread.join()
    service.close()


@pytest.mark.faults
def test_after_sigterm_every_request_is_answered_and_the_service_ends_with_0(trained):
    command = [sys.executable, "-m", "ensemblekit", "serve", str(trained), "--port", "0", "--drain", "2"]
    statuses: list[int] = []
    lost: list[BaseException] = []
    busy = threading.Barrier(NUM_CLIENTS + 1, timeout=60)

    def ask(address: str) -> None:
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            for number in range(100_000):
                connection.request("POST", "/predict", BODY, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                statuses.append(response.status)
                if number == 3:
                    busy.wait()
                if response.status != 200:
                    break
        except Exception as error:
            lost.append(error)
        finally:
            connection.close()

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.fullmatch(r"serving .* at http://(127\.0\.0\.1:\d+)\n", first)
        assert found, first + process.communicate()[1]
        clients = [threading.Thread(target=ask, args=(found[1],)) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        busy.wait()
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join()
        _, stderr = process.communicate(timeout=60)
    assert lost == []
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 4 * NUM_CLIENTS
    assert statuses.count(503) == NUM_CLIENTS, "each client was told that the service is stopping"
    assert (process.returncode, stderr) == (0, "")
