"""Connections without a request, which must not lock others out.

Any process that reaches the address can open connections, and send half a request on each. uvicorn has no time limit
for a first request, and its limit of connections counts those too: it would refuse others, health checks included.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 5.0  # within which a connection has sent a whole request
MOST_WAITING = 256  # connections without one; a further one ends the oldest
MOST = 512  # connections in all, since descriptors are limited

_waiting: dict[PatientProtocol, asyncio.TimerHandle] = {}  # the oldest first


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a limit on connections without a request. The count is the process's, which has one server."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Accept a connection; if too many have sent no request, close the oldest of them."""
        super().connection_made(transport)
        if len(self.connections) > MOST and not _waiting:
            transport.abort()  # all others are being answered
            return
        self._wait()
        if len(_waiting) > MOST_WAITING or len(self.connections) > MOST:
            next(iter(_waiting)).end()

    def data_received(self, data: bytes) -> None:
        """Receive data."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_more()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_no_more()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection: it has sent no request for too long, or others need its place."""
        self._wait_no_more()
        self.transport.abort()

    def _wait(self) -> None:
        self._wait_no_more()
        _waiting[self] = self.loop.call_later(REQUEST_S, self.end)

    def _wait_no_more(self) -> None:
        timer = _waiting.pop(self, None)
        if timer is not None:
            timer.cancel()
