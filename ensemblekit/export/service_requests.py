"""What happens to every request of the service: it is timed, counted, and its connection is closed where it must be."""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ensemblekit.export.service_state import Service

READ_ANYWAY = 2**16
"""Bodies up to this size in bytes are read by the server before the application asks for them."""


class Requests:
    """The outermost layer of the application.

    Args:
        app: the application.
        service: counts the answers, and knows whether it is stopping.
        paths: the known paths; others are counted together.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: Iterable[str]) -> None:
        self.app, self.service, self.paths = app, service, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, is_read = time.monotonic(), False
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def receive_part() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            if message["type"] == "http.response.start":
                # the rest of a refused body is not read, and a client learns that the service is stopping
                if self.service.is_draining or not (is_read or _is_small(Headers(scope=scope))):
                    MutableHeaders(scope=message)["Connection"] = "close"
                self.service.metrics.answered(path, message["status"], time.monotonic() - start)
            await send(message)

        await self.app(scope, receive_part, send_part)


def _is_small(headers: Headers) -> bool:
    """Whether a request announces a body that is read in any case, or none."""
    if "transfer-encoding" in headers:
        return False
    length = headers.get("content-length", "0")
    return length.isdecimal() and int(length) <= READ_ANYWAY
