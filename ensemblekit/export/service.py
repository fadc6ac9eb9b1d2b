"""Serves a trained ensemble over HTTP, until a signal asks it to stop; what it has admitted is answered first."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ensemblekit.core.errors import Interrupted, ResourceError, UsageError
from ensemblekit.export.service_app import make_app
from ensemblekit.export.service_state import Service

HEAD_SECONDS = 10
"""Time in which a connection has to send the head of its request."""
KEEP_ALIVE_SECONDS = 15
"""Time that a connection may be idle between two requests."""
GRACE_SECONDS = 30
"""Time to answer the requests that were admitted before the signal to stop."""
MAX_CONNECTIONS = 1000
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; port 0 stands for a free one.

    Raises:
        ResourceError: the port is in use, or not allowed.
        UsageError: the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError("not the name of a host", f"--host {host}", "use an address such as 127.0.0.1") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # only this finds some ports that are in use
    except OSError as error:
        bound.close()
        where = f"{host}, port {port}"
        if error.errno == errno.EADDRINUSE:
            fix = "stop the program that uses it, or choose another one: --port 0 takes a free one"
            raise ResourceError("the port is in use", where, fix) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ResourceError("the port is not allowed", where, "choose a port above 1023") from error
        fix = "use an address of this machine, such as 127.0.0.1"
        raise UsageError(f"cannot listen: {error.strerror}", where, fix) from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a socket."""
    return ipaddress.ip_address(str(bound.getsockname()[0]).partition("%")[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Return the address that clients on this machine use."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, bound: socket.socket, drain_seconds: float, started: Callable[[], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; returns once every admitted request has its answer.

    Args:
        service: the run to serve.
        bound: the socket to listen on.
        drain_seconds: how long new requests still get an answer, 503, after the signal.
        started: called when requests are taken.

    Raises:
        Interrupted: a second signal stopped it, or requests took too long, so that some have no answer.
    """
    server = Server(service, drain_seconds, started)
    try:
        server.run(sockets=[bound])
    finally:
        if not server.force_exit:
            service.close()
    if server.num_unanswered:
        what = f"stopped with {server.num_unanswered} unanswered request{'s' * (server.num_unanswered != 1)}"
        raise Interrupted(what, "ensemblekit serve", "wait after the first signal", 128 + server.signal_number)


class Server(uvicorn.Server):
    """uvicorn's server, which first says for a while that it is stopping.

    Args:
        service: the run to serve.
        drain_seconds: see `serve`.
        started: see `serve`.
    """

    def __init__(self, service: Service, drain_seconds: float, started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            make_app(service),
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(config)
        self.service, self.drain_seconds, self.when_started = service, drain_seconds, started
        self.signal_number: int = signal.SIGTERM
        self.num_unanswered = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to take requests."""
        await super().startup(sockets)
        self.when_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: new requests get 503 for a while, so that balancers notice; then connections are closed."""
        self.service.is_draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self.drain_seconds
        while loop.time() < end and not self.force_exit:
            await asyncio.sleep(min(0.05, self.drain_seconds))
        await super().shutdown(sockets)
        self.num_unanswered = self.service.num_admitted

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after a signal; after a second one, at once."""
        self.signal_number = sig
        self.service.is_draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs, and do not raise them again: to be stopped is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request head does not arrive in time."""

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a request."""
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
