"""Simulates a machine without network and without files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

OFFLINE = "the contract kit never connects to the network"


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError(OFFLINE)


@contextmanager
def no_network() -> Iterator[None]:
    """Let every connection and name lookup fail at once, as on a machine that is offline."""
    with (
        patch.object(socket.socket, "connect", _refuse),
        patch.object(socket.socket, "connect_ex", _refuse),
        patch.object(socket, "create_connection", _refuse),
        patch.object(socket, "getaddrinfo", _refuse),
    ):
        yield


@contextmanager
def empty_machine() -> Iterator[Path]:
    """Disconnect the network and use empty caches; yields the folder that contains them."""
    with TemporaryDirectory(prefix="ensemblekit-") as folder, no_network():
        caches = {"ENSEMBLEKIT_DATA": str(Path(folder, "data")), "XDG_CACHE_HOME": str(Path(folder, "cache"))}
        with patch.dict(os.environ, caches):
            yield Path(folder)
