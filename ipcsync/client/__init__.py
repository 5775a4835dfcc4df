"""The service from a worker's side: a client, its shared events, and points."""

from ipcsync.client.client import Client, connect
from ipcsync.client.event import SharedEvent
from ipcsync.client.point import Point
from ipcsync.client.rows import EventInfo, Notice, SessionInfo

__all__ = ["Client", "EventInfo", "Notice", "Point", "SessionInfo", "SharedEvent", "connect"]
