"""The journal's records: one for each transition; a start may have to repeat the effects of the last one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ipcsync_coordinator.mirrors import Grave, Origin
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.sessions import SessionEntry, SessionTable
from ipcsync_coordinator.state import Session, Slot


class Effect(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An effect on a line of the board. `values` are stored as they are, without a look at the board."""

    kind: str
    index: int
    values: tuple[int | bool | str, ...] = ()


class SlotRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot as the registry has it; sessions by serial, CUDA events too."""

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
    lingering: list[int]
    left: list[int]
    origin: tuple[bytes, int, int] | None = None
    node: str = ""
    reason: str = ""
    good: int = 0
    is_grave: bool = False

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
            sorted(slot.lingering),
            sorted(slot.left),
            slot.origin,
            slot.node,
            slot.reason,
            slot.good,
            slot.is_grave,
        )


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
            entry.watch.is_confirmed,
            entry.forgotten,
            sorted(session.streams),
            session.role,
        )


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reply that is kept in case its request is repeated."""

    token: bytes
    id: int
    frame: bytes


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The objects that a transition touched, as they are afterwards, its effects on the board, and the reply."""

    count: int = 0  # of sessions there ever were
    high_water: int = 0
    slots: list[SlotRecord] = []
    sessions: list[SessionRecord] = []
    gone: list[int] = []  # serials of sessions whose lines are free
    streams: dict[str, tuple[str, int]] = {}  # those of the sessions in this record
    replies: list[Reply] = []
    effects: list[Effect] = []
    graves: list[tuple[bytes, int, int, str, int, str]] = []  # new ones: epoch, slot, incarnation, node, good, reason


def record_of(
    registry: Registry,
    table: SessionTable,
    slots: Iterable[Slot],
    sessions: Iterable[Session],
    effects: list[Effect],
    replies: list[Reply],
    graves: Iterable[tuple[Origin, Grave]] = (),
) -> Record:
    """The record of a transition that touched those slots and sessions."""
    known, gone, streams = [], [], {}
    for session in sessions:
        entry = table.of_serial(session.serial)
        if session.serial not in registry.sessions or entry is None:
            gone.append(session.serial)
            continue
        known.append(SessionRecord.of(session, entry))
        for name in session.streams:
            streams[name] = registry.streams[name]
    touched = [SlotRecord.of(slot) for slot in slots]
    dug = [(*origin, *grave) for origin, grave in graves]
    return Record(registry.count, registry.high_water, touched, known, gone, streams, replies, effects, dug)


def whole(registry: Registry, table: SessionTable) -> Record:
    """The record of everything."""
    slots, sessions = registry.slots.values(), registry.sessions.values()
    replies = [Reply(*each) for each in table.replies()]
    return record_of(registry, table, slots, sessions, [], replies, registry.graves.everything())
