"""What keeps the server open for those who may ask: of each answer its headers, of each connection its time.

Any process that reaches the address can open connections, and send half a request on each. uvicorn has no time limit
for a first request, and its limit of connections counts those too: it would refuse others, health checks included.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 5.0  # within which a connection has sent a whole request
MOST_WAITING = 256  # connections without one; a further one ends the oldest
MOST = 512  # connections in all, since descriptors are limited

# The page brings all that it needs, and may load nothing else.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Guard:
    """Adds the headers to every answer, and refuses a Host that is not in `hosts` (None: all are allowed).

    A web page can point a name of its own at 127.0.0.1, and then read what is served there; its requests carry that
    name (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        host = _name_of(Headers(scope=scope).get("host", ""))
        answer = self._app
        if self._hosts is not None and host not in self._hosts:
            answer = PlainTextResponse(f"this is not {host!r}: ask for {sorted(self._hosts)[-1]}\n", status_code=421)
        await answer(scope, receive, send_guarded)


def _name_of(host: str) -> str:
    """A Host without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").lower()


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
