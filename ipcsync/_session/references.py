"""References to attachments, which event objects and points hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from ipcsync._engines import Engine
from ipcsync._native.device import Device
from ipcsync._session.waits import Pending, WaitEntry, Waits
from ipcsync.errors import EventClosed

Key: TypeAlias = tuple[int, int]
"""One use of a slot: its number and its incarnation."""


class Table(Protocol):
    """The table of a client's attachments."""

    def share(self, opening: Opening, another: Opening) -> None:
        """Have `another` be a further opening of the same use. EventClosed if `opening` is closed."""

    def close_one(self, opening: Opening, *, wait: bool) -> None:
        """Close the share of one event object; the last one ends the attachment."""


class AttachmentRef:
    """One attachment, as events and points of this process hold it."""

    __slots__ = ("__weakref__", "_waits", "device", "engine")

    def __init__(self, waits: Waits, engine: Engine) -> None:
        self._waits = waits
        self.engine: Engine = engine
        self.device: Device = Device(engine.ordinal)

    def when_done(
        self, pending: Pending, notify: Callable[[Exception | None], object], *, is_callback: bool = False
    ) -> WaitEntry:
        """Call `notify(None)` once the point is complete, or `notify(error)`; on a thread of the session.

        `is_callback`: `notify` is a user's, and may block. Else it returns at once.
        """
        return self._waits.add(pending, notify, is_callback=is_callback)

    def forget(self, entry: WaitEntry) -> None:
        """Cancel a wait. If it ends at this moment, `notify` may still be called."""
        self._waits.remove(entry)


class Opening:
    """One event object's share in an attachment, from before the coordinator is asked until it is closed.

    Its caller makes it before the request, so that an exception at any later moment finds it there, to be closed.
    """

    __slots__ = ("_table", "attached", "key")

    def __init__(self) -> None:
        self._table: Table | None = None
        self.key: Key = (-1, -1)
        self.attached: AttachmentRef | None = None

    def bind(self, table: Table, key: Key, attached: AttachmentRef) -> None:
        """The coordinator has granted it."""
        self.attached = attached
        self.key = key
        self._table = table

    def share(self, another: Opening) -> None:
        """Have `another` be one of the same use, for a copy of the event object. EventClosed if this one is closed."""
        if self._table is None:
            raise EventClosed("the event was closed in this process")
        self._table.share(self, another)

    def close(self, *, wait: bool = True) -> None:
        """End it; the last one ends the attachment. Twice does nothing, and finishes what was begun.

        `wait`: until the coordinator has the close.
        """
        if self._table is not None:
            self._table.close_one(self, wait=wait)
