"""The OpenAPI 3.1 description of the observer, made from the types of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict

import msgspec

import ipcsync
from ipcsync import AttachmentInfo, BridgeInfo, SessionInfo
from ipcsync._rates import Event
from ipcsync.typing import CoordinatorStats


class Problem(TypedDict):
    """Why there is no answer."""

    problem: str


class Health(Problem):
    """Live: this answers. Ready: the coordinator answers within a second; if not, `problem` says why."""

    live: bool
    ready: bool


class State(msgspec.Struct, frozen=True):
    """What the page shows, `at` seconds after the observer began.

    While `ready` is false, `problem` says why, and the other fields are of the last answers; before the first of a
    coordinator, `stats` and the lists are empty. `bridge` is null if there is none, or it did not answer.
    """

    at: float
    problem: str
    ready: bool
    period_s: float
    endpoint: str
    epoch: str
    stats: CoordinatorStats
    sessions: list[SessionInfo]
    sessions_total: int
    events: list[Event]
    events_found: int
    events_total: int
    links: list[AttachmentInfo]
    bridge: BridgeInfo | None


_CONTAINS = {
    "name": "contains",
    "in": "query",
    "schema": {"type": "string"},
    "description": "only events whose names contain this, in any case",
}
Answers: TypeAlias = dict[str, tuple[str, str, type]]
"""By status: what the answer is, its media type, and its type."""


def openapi(served: Mapping[str, tuple[Callable[..., object], Answers]]) -> dict[str, Any]:
    """The description of paths: of each the function that answers, whose docstring says what it is, and its answers."""
    kinds = dict.fromkeys(kind for _, answers in served.values() for _, _, kind in answers.values())
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
    for path, (function, answers) in served.items():
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
