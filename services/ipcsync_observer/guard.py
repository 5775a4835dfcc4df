"""Security headers for every answer, and a check of the Host header."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
