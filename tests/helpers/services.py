"""A service of a run on a free port of this machine, in a thread of this process, and requests to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import ensemblekit as ek
from ensemblekit.export.service import Server, bind, url_of
from ensemblekit.export.service_limits import Limits
from ensemblekit.export.service_state import Service


@contextmanager
def serving(run: Path, **limits: Any) -> Iterator[tuple[str, Service]]:
    """Serve a run; yields the address and the service."""
    service = Service(ek.open_run(run), ek.load(run), Limits(**limits))
    started = threading.Event()
    with bind("127.0.0.1", 0) as bound:
        url = url_of(bound)
        server = Server(service, 0, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert started.wait(30)
            yield url, service
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def problem(response: httpx.Response, status: int) -> dict[str, str]:
    """The error and the fix of a refused request."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "fix"}
    assert all(body.values())
    return body
