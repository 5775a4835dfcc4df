"""The HTTP side. The docstring of what answers a path is its summary in the OpenAPI description."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ipcsync_observer.description import Answers, Health, Problem, State, openapi
from ipcsync_observer.guard import Guard
from ipcsync_observer.metrics import CoordinatorCollector
from ipcsync_observer.sampler import Sampler

STATIC = Path(__file__).parent / "static"

_MOST_STREAMS = 100


class Observer:
    """The paths. Setting `ending` ends the streams, which send a state each of the sampler's periods."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._metrics = CoordinatorCollector(sampler)
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
        return Response(generate_latest(self._metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def description(self, _: Request) -> Response:
        """This description."""
        return JSONResponse(openapi(PATHS))

    async def state(self, request: Request) -> Response:
        """All that the page shows."""
        return Response(_dumped(self._sampler.state(_filter(request))), media_type="application/json")

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

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """The sampler runs as long as the application does."""
        self._sampler.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._sampler.stop)

    def app(self, hosts: frozenset[str] | None = None) -> Starlette:
        """The application. It answers requests for the names in `hosts`; None: for all."""
        return Starlette(
            routes=[
                *(Route(path, getattr(self, function.__name__)) for path, (function, _) in PATHS.items()),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            middleware=[Middleware(Guard, hosts=hosts)],
            lifespan=self.lifespan,
        )


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
