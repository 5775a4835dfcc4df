"""The OpenAPI 3.1 description of the observer, made from the types of its answers."""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

import ipcsync
from ipcsync import AttachmentInfo, BridgeInfo, EventInfo, SessionInfo
from ipcsync.typing import CoordinatorStats

MAX_FILTER = 255
"""The longest filter for events, in characters; the rest is ignored."""


class Health(TypedDict):
    """Live: this answers. Ready: the coordinator answers within a second; if not, `problem` says why."""

    live: bool
    ready: bool
    problem: str


class Readiness(TypedDict):
    """Whether the coordinator answers within a second; if not, `problem` says why."""

    ready: bool
    problem: str


class Problem(TypedDict):
    """Why there is no answer."""

    problem: str


class Event(EventInfo, frozen=True, kw_only=True):
    """One event in one sample. `rate` in generations a second, null until two samples have it and once it is finished.

    `label` tells it from the others, also without a name. `lane` holds [seconds, generation, completed] of the samples
    of the last minute; the stream sends it once.
    """

    label: str
    rate: float | None
    pending_s: float
    lane: list[tuple[float, int, int]] | msgspec.UnsetType = msgspec.UNSET


class State(TypedDict):
    """What the page shows. Before the first answer of a coordinator, `stats` and the lists are empty.

    `bridge` is null if there is none, or it did not answer.
    """

    at: float
    ready: bool
    problem: str
    endpoint: str
    epoch: str
    period_s: float
    stats: CoordinatorStats
    sessions: list[SessionInfo]
    sessions_total: int
    events: list[Event]
    events_found: int
    events_total: int
    links: list[AttachmentInfo]
    bridge: BridgeInfo | None


def openapi() -> dict[str, Any]:
    """The description of every path but the page's own files."""
    _, schemas = msgspec.json.schema_components(
        [State, Health, Readiness, Problem], ref_template="#/components/schemas/{name}"
    )
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    nothing_yet = {"type": "object", "maxProperties": 0}
    properties = schemas["State"]["properties"]
    properties["stats"] = {"anyOf": [properties["stats"], nothing_yet]}
    contains = {
        "name": "contains",
        "in": "query",
        "schema": {"type": "string"},
        "description": f"only events whose names contain this, in any case; {MAX_FILTER} characters of it count",
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ipcsync observer",
            "version": ipcsync.__version__,
            "description": "The sessions and events of one coordinator. All of it is read-only.",
        },
        "paths": {
            "/": _get("The page.", {"200": _answer("the page", "text/html", {"type": "string"})}),
            "/healthz": _get("Whether this answers, and the coordinator does.", {"200": _json("always", "Health")}),
            "/healthz/ready": _get(
                "The same by status code, for probes.",
                {
                    "200": _json("the coordinator is ready", "Readiness"),
                    "503": _json("it is not", "Readiness"),
                },
            ),
            "/metrics": _get(
                "The metrics, in Prometheus's text format.",
                {"200": _answer("the metrics", "text/plain", {"type": "string"})},
            ),
            "/openapi.json": _get(
                "This description.", {"200": _answer("the description", "application/json", {"type": "object"})}
            ),
            "/api/state": _get("All that the page shows.", {"200": _json("the state", "State")}, contains),
            "/api/stream": _get(
                "The state once a period, each as the data of a server-sent event: the first with the events' lanes.",
                {
                    "200": _answer("states without end", "text/event-stream", {"type": "string"}),
                    "503": _json("too many pages are open", "Problem"),
                },
                contains,
            ),
        },
        "components": {
            "schemas": schemas,
            "responses": {
                "Misdirected": _answer(
                    "a server on loopback was asked for a name other than loopback's", "text/plain", {"type": "string"}
                )
            },
        },
    }


def _answer(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _json(description: str, name: str) -> dict[str, Any]:
    return _answer(description, "application/json", {"$ref": f"#/components/schemas/{name}"})


def _get(summary: str, answers: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    responses = {**answers, "421": {"$ref": "#/components/responses/Misdirected"}}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": responses}}
