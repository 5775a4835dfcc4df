"""Connections that say nothing: none of them keeps anybody else out.

Whoever reaches the address can open connections, and send half a request on each. uvicorn has no limit of time for a
first request, and its limit of connections counts those too: it would refuse everybody else, health checks included.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 5.0  # within which a connection has sent a whole request
MOST_WAITING = 256  # connections without one; a further one ends the oldest
MOST = 512  # connections in all: descriptors are not without end

_waiting: dict[PatientProtocol, asyncio.TimerHandle] = {}  # the oldest first


class PatientProtocol(H11Protocol):
    """HTTP/1.1, for as many clients as send requests. A process has one server, and so one count of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Take in a connection, in place of the oldest that has sent no request if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST and not _waiting:
            transport.abort()  # each of the others is being answered
            return
        self._wait()
        if len(_waiting) > MOST_WAITING or len(self.connections) > MOST:
            next(iter(_waiting)).end()

    def data_received(self, data: bytes) -> None:
        """Take in what was sent."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_more()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._wait_no_more()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close it: it has sent no request for too long, or others need its place."""
        self._wait_no_more()
        self.transport.abort()

    def _wait(self) -> None:
        self._wait_no_more()
        _waiting[self] = self.loop.call_later(REQUEST_S, self.end)

    def _wait_no_more(self) -> None:
        timer = _waiting.pop(self, None)
        if timer is not None:
            timer.cancel()
