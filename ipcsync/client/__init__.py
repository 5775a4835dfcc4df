"""The worker's side of the service: a client, its shared events, and points. Its asyncio twin is `client.aio`."""

from __future__ import annotations

from ipcsync._session.feed import Notice
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, NodeInfo, PeerInfo, SessionInfo
from ipcsync.client._connecting import connect, default_client
from ipcsync.client.client import Client
from ipcsync.client.event import DEFAULT_DEPTH, SharedEvent
from ipcsync.client.graphs import GraphRecord, GraphWait, Replay, Replaying, Upcoming
from ipcsync.client.point import Point, synchronize_all, wait_all
from ipcsync.client.unnamed import Reservation

__all__ = [
    "DEFAULT_DEPTH",
    "AttachmentInfo",
    "BridgeInfo",
    "Client",
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
    "connect",
    "default_client",
    "synchronize_all",
    "wait_all",
]
