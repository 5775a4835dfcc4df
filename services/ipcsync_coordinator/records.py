"""The journal's records: one for each transition; a start may have to repeat the effects of the last one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ipcsync._wire.messages import Attachment, Message, Remains
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.sessions import Kept, SessionEntry, SessionTable, Use
from ipcsync_coordinator.state import Session, Slot, Touched
from ipcsync_coordinator.tombstones import Origin, Tombstone


class Effect(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An effect on a line of the board. `values` are stored as they are, without a look at the board."""

    kind: str
    index: int
    values: tuple[int | bool | str, ...] = ()


class SlotRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot as the registry has it, with all its attachments; sessions by serial, CUDA events too."""

    index: int
    state: str
    incarnation: int
    name: str
    device: str
    engine: str
    depth: int
    base: int
    is_drained: bool
    recorder: tuple[int, str, str] | None  # serial, id, name: its session may be gone
    ring: list[int]
    active: list[int]
    draining: list[int]
    left: list[int]
    origin: tuple[bytes, int, int] | None = None
    node: str = ""
    reason: str = ""
    good: int = 0
    is_tombstone: bool = False
    remains: Remains | None = None
    recorder_pid: int = 0
    freed: int = 0

    @classmethod
    def of(cls, slot: Slot) -> SlotRecord:
        """The record of a slot."""
        recorder = slot.recorder
        return cls(
            slot.index,
            slot.state,
            slot.incarnation,
            slot.name,
            slot.device,
            slot.engine,
            slot.depth,
            slot.base,
            slot.is_drained,
            None if recorder is None else (recorder.serial, recorder.id, recorder.name),
            [shared.serial for shared in slot.ring or ()],
            sorted(slot.active),
            sorted(slot.draining),
            sorted(slot.left),
            slot.origin,
            slot.node,
            slot.reason,
            slot.good,
            slot.is_tombstone,
            slot.remains,
            0 if recorder is None else recorder.pid,
            slot.freed,
        )


class AttachmentRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One session's attachment to a slot: "active", "draining" or "left", "" if there is none any more.

    A slot's own record has as many as hold it, so the record of each that comes or goes would grow with their number.
    """

    index: int
    serial: int
    state: str

    @classmethod
    def of(cls, slot: Slot, serial: int) -> AttachmentRecord:
        """The record of a session's attachment to a slot."""
        for state, serials in (("active", slot.active), ("draining", slot.draining), ("left", slot.left)):
            if serial in serials:
                return cls(slot.index, serial, state)
        return cls(slot.index, serial, "")


class SessionRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A session as the registry and the session table have it, without what slots and replies contain."""

    serial: int
    id: str
    name: str
    state: str
    pid: int
    started: int
    token: bytes
    nonce: bytes
    ttl_ns: int
    opened_ns: int
    why_not_event: str | None
    is_ready: bool
    is_confirmed: bool
    forgotten: int
    streams: list[str]
    role: str = ""

    @classmethod
    def of(cls, session: Session, entry: SessionEntry) -> SessionRecord:
        """The record of a session."""
        return cls(
            session.serial,
            session.id,
            session.name,
            session.state,
            entry.watch.pid,
            entry.watch.started,
            entry.token,
            entry.nonce,
            entry.ttl_ns,
            entry.opened_ns,
            entry.why_not_event,
            entry.is_ready,
            entry.watch.is_confirmed or entry.was_confirmed,
            entry.forgotten,
            sorted(session.streams),
            session.role,
        )


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reply that is kept in case its request is repeated."""

    token: bytes
    id: int
    kept: Kept

    @classmethod
    def of(cls, token: bytes, request_id: int, body: Message, frame: bytes) -> Reply:
        """The reply with that body and frame."""
        if isinstance(body, Attachment):
            return cls(token, request_id, Use(body.slot, body.incarnation, body.recorder))
        return cls(token, request_id, frame)


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The objects that a transition touched, as they are afterwards, its effects on the board, and the reply.

    A slot is in it either as a whole, or with those of its attachments that changed.
    """

    count: int = 0  # of sessions there ever were
    high_water: int = 0
    slots: list[SlotRecord] = []
    sessions: list[SessionRecord] = []
    gone: list[int] = []  # serials of sessions whose lines are free
    streams: dict[str, tuple[str, int]] = {}  # those of the sessions in this record
    replies: list[Reply] = []
    effects: list[Effect] = []
    tombstones: list[tuple[bytes, int, int, str, int, str]] = []  # new: epoch, slot, incarnation, node, good, reason
    attachments: list[AttachmentRecord] = []


def record_of(
    registry: Registry,
    table: SessionTable,
    touched: Touched,
    effects: list[Effect],
    replies: list[Reply],
    tombstones: Iterable[tuple[Origin, Tombstone]] = (),
) -> Record:
    """The record of a transition that touched that."""
    known, gone, streams = [], [], {}
    for session in touched.sessions:
        entry = table.of_serial(session.serial)
        if session.serial not in registry.sessions or entry is None:
            gone.append(session.serial)
            continue
        known.append(SessionRecord.of(session, entry))
        for name in session.streams:
            streams[name] = registry.streams[name]
    slots = [SlotRecord.of(slot) for slot in touched.slots]
    others = [(slot, serial) for slot, serial in touched.attachments if slot not in touched.slots]
    attachments = [AttachmentRecord.of(slot, serial) for slot, serial in others]
    lost = [(*origin, *tombstone) for origin, tombstone in tombstones]
    return Record(registry.count, registry.high_water, slots, known, gone, streams, replies, effects, lost, attachments)


def whole(registry: Registry, table: SessionTable) -> Record:
    """The record of everything."""
    everything = Touched(set(registry.slots.values()), set(registry.sessions.values()))
    replies = [Reply(*each) for each in table.replies()]
    return record_of(registry, table, everything, [], replies, registry.tombstones.everything())


def folded(records: Iterable[Record]) -> Record:
    """What those records come to, as one record of everything, with slots by index and replies in order.

    KeyError if one is of an attachment to a slot, or names a stream, that none has.
    """
    last = Record()
    slots: dict[int, SlotRecord] = {}
    attachments: dict[int, dict[int, str]] = {}  # by slot and session
    sessions: dict[int, SessionRecord] = {}
    streams: dict[str, tuple[str, int]] = {}
    replies: list[Reply] = []
    tombstones: list[tuple[bytes, int, int, str, int, str]] = []
    for last in records:
        for slot in last.slots:
            slots[slot.index] = slot
            states = {"active": slot.active, "draining": slot.draining, "left": slot.left}
            attachments[slot.index] = {serial: state for state, serials in states.items() for serial in serials}
        for each in last.attachments:
            attachments[each.index][each.serial] = each.state
        sessions.update((session.serial, session) for session in last.sessions)
        for serial in last.gone:
            sessions.pop(serial, None)
        streams.update(last.streams)
        replies += last.replies
        tombstones += last.tombstones
    return Record(
        last.count,
        last.high_water,
        [_with_attachments(slots[index], attachments[index]) for index in sorted(slots)],
        [sessions[serial] for serial in sorted(sessions)],
        streams={name: streams[name] for session in sessions.values() for name in session.streams},
        replies=replies,
        tombstones=tombstones,
    )


def _with_attachments(slot: SlotRecord, states: dict[int, str]) -> SlotRecord:
    lists: dict[str, list[int]] = {"active": [], "draining": [], "left": [], "": []}
    for serial in sorted(states):
        lists[states[serial]].append(serial)
    return msgspec.structs.replace(slot, active=lists["active"], draining=lists["draining"], left=lists["left"])
