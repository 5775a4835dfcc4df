"""The journal's records: one for each transition; a start may have to carry out the last one again."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ipcsync._wire.messages import Attachment, Message
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.sessions import SessionTable
from ipcsync_coordinator.state import Kept, Origin, Session, Slot, Tombstone, Touched, Use


class AttachmentRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One session's attachment to a slot: "active" or "draining", "" if there is none any more.

    A slot's own row has as many as hold it, so the record of each that comes or goes would grow with their number.
    """

    index: int
    serial: int
    state: str

    @classmethod
    def of(cls, slot: Slot, serial: int) -> AttachmentRecord:
        """The record of a session's attachment to a slot."""
        state = "active" if serial in slot.active else "draining" if serial in slot.draining else ""
        return cls(slot.index, serial, state)

    def apply(self, slot: Slot) -> None:
        """Have the slot's row say the same."""
        for state, serials in (("active", slot.active), ("draining", slot.draining)):
            (serials.add if state == self.state else serials.discard)(self.serial)


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reply that is kept in case its request is repeated."""

    token: bytes
    id: int
    kept: Kept

    @classmethod
    def of(cls, token: bytes, request_id: int, body: Message | None, frame: bytes) -> Reply:
        """The reply with that body and frame; a refusal has no body."""
        if isinstance(body, Attachment):
            return cls(token, request_id, Use(body.slot, body.incarnation, body.recorder))
        return cls(token, request_id, frame)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The rows that a transition touched, as they are afterwards, and the reply. A session in it may be gone.

    A slot is in it either as a whole, or with those of its attachments that changed.
    """

    count: int = 0  # of sessions there ever were
    high_water: int = 0
    slots: list[Slot] = []
    sessions: list[Session] = []
    streams: dict[str, tuple[str, int]] = {}  # those of the sessions in this record
    replies: list[Reply] = []
    tombstones: list[tuple[Origin, Tombstone]] = []  # new ones
    attachments: list[AttachmentRecord] = []


def record_of(
    registry: Registry, touched: Touched, replies: list[Reply], tombstones: list[tuple[Origin, Tombstone]]
) -> Record:
    """The record of a transition that touched that."""
    streams = {name: registry.streams[name] for session in touched.sessions for name in session.streams}
    others = [(slot, serial) for slot, serial in touched.attachments if slot not in touched.slots]
    return Record(
        registry.count,
        registry.high_water,
        list(touched.slots),
        list(touched.sessions),
        streams,
        replies,
        tombstones,
        [AttachmentRecord.of(slot, serial) for slot, serial in others],
    )


def whole(registry: Registry, table: SessionTable) -> Record:
    """The record of everything."""
    everything = Touched(set(registry.slots.values()), set(registry.sessions.values()))
    replies = [Reply(*each) for each in table.replies()]
    return record_of(registry, everything, replies, registry.tombstones.everything())


def folded(records: Iterable[Record]) -> Record:
    """What those records come to, as one record of everything, with slots by index and replies in order.

    KeyError if one is of an attachment to a slot, or names a stream, that none has.
    """
    last = Record()
    slots: dict[int, Slot] = {}
    sessions: dict[int, Session] = {}
    streams: dict[str, tuple[str, int]] = {}
    replies: list[Reply] = []
    tombstones: list[tuple[Origin, Tombstone]] = []
    for last in records:
        slots.update((slot.index, slot) for slot in last.slots)
        for each in last.attachments:
            each.apply(slots[each.index])
        for session in last.sessions:
            sessions[session.serial] = session
            if session.state == "gone":
                del sessions[session.serial]
        streams.update(last.streams)
        replies += last.replies
        tombstones += last.tombstones
    return Record(
        last.count,
        last.high_water,
        [slots[index] for index in sorted(slots)],
        [sessions[serial] for serial in sorted(sessions)],
        streams={name: streams[name] for session in sessions.values() for name in session.streams},
        replies=replies,
        tombstones=tombstones,
    )
