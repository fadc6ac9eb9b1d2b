"""What the tests of downloaded and decoded images share: a cache of their own and a server on this machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.image_files import encoded


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(folder))
    return folder


class FileServer(ThreadingHTTPServer):
    """Serves `files` by name; sends only the first `cut_at` bytes of each if that is set; stalls while asked to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: Mapping[str, bytes] = {}
        self.cut_at: int | None = None
        self.stall: threading.Event | None = None
        self.url = f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        if self.server.stall:
            self.server.stall.wait(10)
            return
        contents = self.server.files.get(self.path.lstrip("/"))
        self.send_response(404 if contents is None else 200)
        self.send_header("Content-Length", str(len(contents or b"")))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who only asks where a file is hangs up before its end
            self.wfile.write((contents or b"")[: self.server.cut_at])

    def log_message(self, *args: object) -> None:
        """Nothing: the log would go to stderr."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with FileServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        if running.stall:
            running.stall.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def image_bytes() -> Callable[..., bytes]:
    return encoded
