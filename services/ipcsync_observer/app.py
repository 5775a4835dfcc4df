"""The HTTP side. The docstring of what answers a path is its summary in the OpenAPI description."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import signal
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import msgspec
import uvicorn
from msgspec import UNSET
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import ipcsync
from ipcsync._logs import fields
from ipcsync_observer.sampler import Sampler, State

STATIC = Path(__file__).parent / "static"

log = logging.getLogger("ipcsync.observer")

_MOST_STREAMS = 100
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_BACKLOG = 128
_REQUEST_S = 5.0  # within which a connection has sent a whole request, and takes what it is sent
_MOST_WAITING = 256  # connections that have not; a further one ends the oldest
_MOST = 512  # connections in all, since descriptors are limited
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


class Problem(TypedDict):
    """Why there is no answer."""

    problem: str


class Health(Problem):
    """Live: this answers. Ready: the coordinator answers within a second; if not, `problem` says why."""

    live: bool
    ready: bool


class Observer:
    """The paths. Setting `ending` ends the streams, which send a state each of the sampler's periods."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._streams: weakref.WeakSet[AsyncIterator[str]] = weakref.WeakSet()  # of pages that are open
        self.ending = asyncio.Event()

    async def page(self, _: Request) -> Response:
        """The page."""
        return FileResponse(STATIC / "index.html", media_type="text/html")

    async def healthz(self, _: Request) -> Response:
        """Whether this answers, and the coordinator does."""
        return JSONResponse(self._health())

    async def ready(self, _: Request) -> Response:
        """The same by status code, for probes."""
        health = self._health()
        return JSONResponse(health, 200 if health["ready"] else 503)

    def _health(self) -> Health:
        state = self._sampler.latest
        return {"live": True, "ready": state.ready, "problem": state.problem}

    async def metrics(self, _: Request) -> Response:
        """The metrics, in Prometheus's text format."""
        return Response(generate_latest(self._sampler), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def description(self, _: Request) -> Response:
        """This description."""
        return JSONResponse(openapi())

    async def state(self, request: Request) -> Response:
        """All that the page shows."""
        return Response(_dumped(self._sampler.state(_filter(request))), media_type=_JSON)

    async def stream(self, request: Request) -> Response:
        """The state once a period, each as the data of a server-sent event: the first with the events' lanes."""
        if len(self._streams) >= _MOST_STREAMS:
            problem = f"{_MOST_STREAMS} pages are open already"
            return JSONResponse({"problem": problem}, 503, {"Retry-After": "10"})
        states = self._states(_filter(request))
        self._streams.add(states)
        return StreamingResponse(states, media_type="text/event-stream")

    async def _states(self, contains: str) -> AsyncIterator[str]:
        with_lanes = True
        while not self.ending.is_set():
            state = self._sampler.state(contains, with_lanes=with_lanes)
            yield f"data: {_dumped(state)}\n\n"
            with_lanes = False
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.ending.wait(), self._sampler.period_s)

    def app(self, hosts: frozenset[str] | None) -> Starlette:
        """The application. It answers requests for the names in `hosts`; None: for all."""
        return Starlette(
            routes=[
                *(Route(path, getattr(self, function.__name__)) for path, (function, _) in PATHS.items()),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            middleware=[Middleware(Guard, hosts=hosts)],
        )


Answers: TypeAlias = dict[str, tuple[str, str, type]]
"""By status: what the answer is, its media type, and its type."""

_JSON = "application/json"
PATHS: dict[str, tuple[Callable[[Observer, Request], Awaitable[Response]], Answers]] = {
    "/": (Observer.page, {"200": ("the page", "text/html", str)}),
    "/healthz": (Observer.healthz, {"200": ("always", _JSON, Health)}),
    "/healthz/ready": (Observer.ready, {"200": ("it is ready", _JSON, Health), "503": ("it is not", _JSON, Health)}),
    "/metrics": (Observer.metrics, {"200": ("the metrics", "text/plain", str)}),
    "/openapi.json": (Observer.description, {"200": ("the description", _JSON, dict)}),
    "/api/state": (Observer.state, {"200": ("the state", _JSON, State)}),
    "/api/stream": (
        Observer.stream,
        {"200": ("states without end", "text/event-stream", str), "503": ("too many pages are open", _JSON, Problem)},
    ),
}
"""Each path but the page's own files: who answers, and what."""


def _dumped(state: State) -> str:
    """As JSON, with what a message would leave out because it has its default."""
    return json.dumps(state, default=lambda row: {key: at for key, at in asdict(row).items() if at is not UNSET})


def _filter(request: Request) -> str:
    return request.query_params.get("contains", "")


_CONTAINS = {
    "name": "contains",
    "in": "query",
    "schema": {"type": "string"},
    "description": "only events whose names contain this, in any case",
}


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 description of `PATHS`."""
    kinds = dict.fromkeys(kind for _, answers in PATHS.values() for _, _, kind in answers.values())
    found, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, found, strict=True))
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    stats = schemas["State"]["properties"]["stats"]
    schemas["State"]["properties"]["stats"] = {"anyOf": [stats, {"type": "object", "maxProperties": 0}]}

    def answer(text: str, media_type: str, kind: type) -> dict[str, Any]:
        return {"description": text, "content": {media_type: {"schema": schema_of[kind]}}}

    paths = {}
    for path, (function, answers) in PATHS.items():
        responses = {status: answer(*told) for status, told in answers.items()}
        responses["421"] = {"$ref": "#/components/responses/Misdirected"}
        parameters = [_CONTAINS] if path.startswith("/api/") else []
        paths[path] = {"get": {"summary": function.__doc__, "parameters": parameters, "responses": responses}}
    refusal = "a server on loopback was asked for a name other than loopback's"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ipcsync observer",
            "version": ipcsync.__version__,
            "description": "The sessions and events of one coordinator. All of it is read-only.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "responses": {"Misdirected": answer(refusal, "text/plain", str)}},
    }


# --- the server -------------------------------------------------------------------------------------------------------


class Guard:
    """Adds the headers to every answer, and refuses a Host that is not in `hosts` (None: all are allowed).

    A page can point its own name at 127.0.0.1 and read what is served there, by requests of that name (DNS rebinding).
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

        host = Headers(scope=scope).get("host", "")
        name, _, port = host.rpartition(":")
        host = (name if name and port.isdigit() else host).strip("[]").lower()
        answer = self._app
        if self._hosts is not None and host not in self._hosts:
            answer = PlainTextResponse(f"this is not {host!r}: ask for {sorted(self._hosts)[-1]}\n", status_code=421)
        await answer(scope, receive, send_guarded)


_waiting: dict[PatientProtocol, asyncio.TimerHandle] = {}  # connections that are waited for, the oldest first


class PatientProtocol(H11Protocol):
    """HTTP/1.1 in which connections that ask for nothing, or take no answer, lock no others out, nor health checks.

    Any process that reaches the address can open connections, and send half a request on each. uvicorn has no time
    limit for a first request, and its own limit of connections counts those too. The count is the process's.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Accept a connection; if too many have sent no request, close the oldest of them."""
        super().connection_made(transport)
        self._wait()
        if len(_waiting) > _MOST_WAITING or len(self.connections) > _MOST:
            next(iter(_waiting)).end()  # this one, if all others are being answered

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering and not self.flow.write_paused:
            self._wait_no_more()

    def pause_writing(self) -> None:
        """Wait until what was sent is taken."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """Go on with the answer, or wait for the next request."""
        super().resume_writing()
        (self._wait_no_more if self._is_answering else self._wait)()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection: it has sent no request for too long, or others need its place."""
        self._wait_no_more()
        self.transport.abort()

    def _wait(self) -> None:
        self._wait_no_more()
        _waiting[self] = self.loop.call_later(_REQUEST_S, self.end)

    def _wait_no_more(self) -> None:
        if (timer := _waiting.pop(self, None)) is not None:
            timer.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address cannot be used."""
    (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


async def serve(listening: socket.socket, sampler: Sampler) -> None:
    """Serve on a socket until SIGTERM or Ctrl-C."""
    host, port = listening.getsockname()[:2]
    is_loopback = ipaddress.ip_address(host).is_loopback
    observer = Observer(sampler)
    config = uvicorn.Config(
        observer.app(_LOOPBACK_NAMES | {host} if is_loopback else None),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        http=PatientProtocol,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    # It leaves signals alone: by its own handling it would end by the signal, not with status 0.
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]

    def end() -> None:
        server.should_exit = True
        observer.ending.set()  # of streams, and so of the requests of open pages

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    log.info("ready", extra=fields(url=f"http://{f'[{host}]' if ':' in host else host}:{port}/"))
    if not is_loopback:
        log.warning("any process that reaches this address can read what it serves", extra=fields(host=host))
    sampler.start()
    try:
        await server.serve(sockets=[listening])
    finally:
        sampler.stop()
    log.info("stopped")
