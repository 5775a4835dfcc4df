"""The worker's side of the service: a client, its shared events, and points. The asyncio twin is loaded when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipcsync._session.feed import Notice
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, NodeInfo, PeerInfo, SessionInfo
from ipcsync.client._connecting import connect, default_client
from ipcsync.client._fan_in import synchronize_all, wait_all
from ipcsync.client._opening import DEFAULT_DEPTH
from ipcsync.client.client import Client
from ipcsync.client.event import SharedEvent
from ipcsync.client.graphs.captured import GraphRecord, GraphWait
from ipcsync.client.graphs.replay import Replay, Replaying
from ipcsync.client.graphs.upcoming import Upcoming
from ipcsync.client.point import Point
from ipcsync.client.reservation import Reservation

if TYPE_CHECKING:
    from ipcsync.client.aio.client import (
        AsyncClient,
        AsyncPoint,
        AsyncReplay,
        AsyncReplaying,
        AsyncReservation,
        AsyncSharedEvent,
        AsyncUpcoming,
        Connecting,
        aconnect,
    )

__all__ = [
    "DEFAULT_DEPTH",
    "AsyncClient",
    "AsyncPoint",
    "AsyncReplay",
    "AsyncReplaying",
    "AsyncReservation",
    "AsyncSharedEvent",
    "AsyncUpcoming",
    "AttachmentInfo",
    "BridgeInfo",
    "Client",
    "Connecting",
    "EventInfo",
    "GraphRecord",
    "GraphWait",
    "NodeInfo",
    "Notice",
    "PeerInfo",
    "Point",
    "Replay",
    "Replaying",
    "Reservation",
    "SessionInfo",
    "SharedEvent",
    "Upcoming",
    "aconnect",
    "connect",
    "default_client",
    "synchronize_all",
    "wait_all",
]

_ASYNC = {*(name for name in __all__ if name.startswith("Async")), "Connecting", "aconnect"}


def __getattr__(name: str) -> object:
    if name not in _ASYNC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ipcsync.client.aio import client as aio

    return getattr(aio, name)
