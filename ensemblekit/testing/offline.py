"""A machine without network and without files, for as long as a check takes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

OFFLINE = "there is no network in a check"


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError(OFFLINE)


@contextmanager
def no_network() -> Iterator[None]:
    """Every connection and every look-up of a name fails at once, as on a machine that is not connected."""
    with (
        patch.object(socket.socket, "connect", _refuse),
        patch.object(socket.socket, "connect_ex", _refuse),
        patch.object(socket, "create_connection", _refuse),
        patch.object(socket, "getaddrinfo", _refuse),
    ):
        yield


@contextmanager
def empty_machine() -> Iterator[Path]:
    """No network, and caches that are empty; gives the folder that they are in."""
    with TemporaryDirectory(prefix="ensemblekit-") as folder, no_network():
        places = {"ENSEMBLEKIT_DATA": str(Path(folder, "data")), "XDG_CACHE_HOME": str(Path(folder, "cache"))}
        with patch.dict(os.environ, places):
            yield Path(folder)
