"""The journal: a record of each transition, before any effect is visible outside (docs/design/daemon.md has the order).

Stores survive a killed coordinator. So one store makes a record valid, and another one says that its effects were
carried out; without that, the next coordinator carries them out again. Replies come after. This order is what makes a
coordinator's death at any step harmless.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from ipcsync._board import BROKEN, CLOSED, FREE, OPEN, Board
from ipcsync._logs import fields, is_round
from ipcsync._wire.codec import Origin
from ipcsync._wire.messages import Attachment, Message
from ipcsync.errors import QuotaExceeded
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Kept, Session, SessionTable, Slot, Tombstone, Touched, Use
from ipcsync_keeper.resources import (
    CARRIED_OUT,
    CRASH_COUNTERS,
    CRASHES,
    CURRENT,
    CURRENT_REQUEST,
    KILLED_FROM_OUTSIDE,
    MOST_REPLIES,
    REPLIES,
    VALID,
    JournalFiles,
)

log = logging.getLogger("ipcsync.coordinator")

_HEAD = 8  # of a record: its length and its checksum, 4 bytes each
_LEAST_ROOM = 256 * 1024
_LEAST_LIMIT = 512 * 1024  # a start reads all of it
_GROWTH = 2  # a log is compacted once it has so many times the size that it was compacted to
# A request is refused once coordinators died twice while they handled it, or were killed four times: a kill usually has
# nothing to do with the request, but the kernel's does if it used up the memory.
_POISON, _DIED, _KILLED = 4, 2, 1


# --- records, and what many of them add up to -------------------------------------------------------------------------


class AttachmentRecord(NamedTuple):
    """One session's attachment to a slot: "active" or "draining", "" if there is none any more.

    A slot's own row has as many as hold it, so the record of each that comes or goes would grow with their number.
    """

    slot: int
    serial: int
    state: str


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
    replies: list[Reply] = []
    tombstones: list[tuple[Origin, Tombstone]] = []  # new ones
    attachments: list[AttachmentRecord] = []
    has_had_bridge: bool = False


def record_of(
    registry: Registry, touched: Touched, replies: list[Reply], tombstones: list[tuple[Origin, Tombstone]]
) -> Record:
    attachments = [
        AttachmentRecord(
            slot.index, serial, "active" if serial in slot.active else "draining" if serial in slot.draining else ""
        )
        for slot, serial in touched.attachments
        if slot not in touched.slots
    ]
    slots, sessions = list(touched.slots), list(touched.sessions)
    rows = slots, sessions, replies, tombstones, attachments
    return Record(registry.count, registry.high_water, *rows, registry.has_had_bridge)


def whole(registry: Registry, table: SessionTable) -> Record:
    everything = Touched(set(registry.slots.values()), set(registry.sessions.values()))
    replies = [Reply(*each) for each in table.replies()]
    return record_of(registry, everything, replies, registry.tombstones.everything())


def folded(records: Iterable[Record]) -> Record:
    """What those records come to, as one record of everything, with slots by index and replies in order.

    KeyError if one is of an attachment to a slot that none has.
    """
    last = Record()
    slots: dict[int, Slot] = {}
    sessions: dict[int, Session] = {}
    replies: list[Reply] = []
    tombstones: list[tuple[Origin, Tombstone]] = []
    for last in records:
        slots.update((slot.index, slot) for slot in last.slots)
        for index, serial, state in last.attachments:
            for kind, serials in (("active", slots[index].active), ("draining", slots[index].draining)):
                (serials.add if kind == state else serials.discard)(serial)
        for session in last.sessions:
            sessions[session.serial] = session
            if session.state == "gone":
                del sessions[session.serial]
        replies += last.replies
        tombstones += last.tombstones
    rows = [slots[index] for index in sorted(slots)], [sessions[serial] for serial in sorted(sessions)]
    return Record(last.count, last.high_water, *rows, replies, tombstones, [], last.has_had_bridge)


# --- the log ----------------------------------------------------------------------------------------------------------


class JournalError(Exception):
    """The journal cannot be read; the message says where it is invalid."""


class Journal:
    """Appends to the current log, and starts the other one when it has grown too long. `whole` records everything."""

    def __init__(self, files: JournalFiles, whole: Callable[[], Record]) -> None:
        self._words = files.words
        self._logs = files.logs
        self._whole = whole
        self._encode = msgspec.msgpack.Encoder().encode
        self._which = self._words[CURRENT] & 1
        self._end = self._words[VALID + self._which]
        self._room = os.fstat(self._logs[self._which]).st_size
        self._limit = _LEAST_LIMIT  # the limit of the last coordinator is unknown
        self._poison = self._count_crash()

    # --- records ------------------------------------------------------------------------------------------------------

    def read(self) -> tuple[list[Record], bool]:
        """All records, and whether the effects of the last one were carried out. Raises JournalError."""
        data = memoryview(Path(f"/proc/self/fd/{self._logs[self._which]}").read_bytes())[: self._end]
        if len(data) != self._end:
            raise JournalError(f"the log has {len(data)} bytes, and {self._end} are said to be valid")
        records, at = [], 0
        while at < self._end:
            length = int.from_bytes(data[at : at + 4], "little")
            body = data[at + _HEAD : at + _HEAD + length]
            if len(body) != length or zlib.crc32(body) != int.from_bytes(data[at + 4 : at + _HEAD], "little"):
                raise JournalError(f"the record at byte {at} is damaged")
            try:
                records.append(msgspec.msgpack.decode(body, type=Record))
            except msgspec.MsgspecError as error:
                raise JournalError(f"the record at byte {at} is invalid: {error}") from None
            at += _HEAD + length
        return records, self._words[CARRIED_OUT + self._which] == self._end

    def make_room(self, size: int = 0) -> None:
        """Reserve memory for a request's record, `size` bytes beyond an ordinary one; QuotaExceeded if there is none.

        What cannot be refused, as a death, is appended if there is room, else at a later tick.
        """
        wanted = self._end + _LEAST_ROOM + size
        if wanted > self._room:
            try:
                os.posix_fallocate(self._logs[self._which], 0, wanted + _LEAST_ROOM)
            except OSError as error:
                raise QuotaExceeded(f"no memory for the journal: {error.strerror}", limit=self._room) from None
            self._room = wanted + _LEAST_ROOM

    def append(self, record: Record) -> None:
        """Append a record, which is then valid whatever happens to this process."""
        self._end = self._write(self._logs[self._which], record, self._end)
        self._words[VALID + self._which] = self._end

    def _write(self, log: int, record: Record, at: int) -> int:
        body = self._encode(record)
        frame = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
        left = memoryview(frame)
        while left:  # one call writes 2 GiB at most
            done = os.pwrite(log, left, at)
            if not done:
                raise OSError(f"{len(left)} of a record's {len(frame)} bytes were not written")
            left, at = left[done:], at + done
        return at

    def carried_out(self) -> None:
        """Store that the effects of the last record were carried out: no later start repeats them."""
        self._words[CARRIED_OUT + self._which] = self._end
        if self._end > self._limit:
            try:
                self._compact()
            except (OSError, MemoryError) as error:
                # The current log is whole, and what asked for this is done.
                os.ftruncate(self._logs[1 - self._which], 0)
                self._limit = self._end + _LEAST_LIMIT
                log.warning("the journal was not compacted", extra=fields(why=error, bytes=self._end))

    def _compact(self) -> None:
        """Write everything into the other log, and make that one the current log by one store."""
        other = 1 - self._which
        record = self._whole()
        os.ftruncate(self._logs[other], 0)
        end = self._write(self._logs[other], record, 0)
        self._words[VALID + other] = end
        self._words[CARRIED_OUT + other] = end
        self._words[CURRENT] = other
        self._which, self._end, self._room = other, end, end
        self._limit = max(_LEAST_LIMIT, _GROWTH * end)
        os.ftruncate(self._logs[1 - other], 0)
        with suppress(QuotaExceeded):  # for deaths, which cannot be refused
            self.make_room()

    def most_replies(self, setting: int) -> int:
        """How many replies of a session are kept: not fewer than any coordinator has let it have in flight."""
        self._words[MOST_REPLIES] = max(self._words[MOST_REPLIES], setting)
        return self._words[MOST_REPLIES]

    # --- the request in hand ------------------------------------------------------------------------------------------

    def begin_request(self, frame: bytes) -> bool:
        """Store which request is handled from now on; returns whether it is refused, as coordinators died of it."""
        looks = zlib.crc32(frame) << 31 | len(frame)
        self._words[CURRENT_REQUEST] = looks
        return bool(self._poison) and looks in self._poison

    def end_request(self) -> None:
        """Store that the request was done, before its reply is sent."""
        self._words[CURRENT_REQUEST] = 0
        self._words[REPLIES] += 1

    def _count_crash(self) -> frozenset[int]:
        """Count the request during which the last coordinator died; returns the requests that are to be refused."""
        words, looks = self._words, self._words[CURRENT_REQUEST]
        places = [CRASHES + 2 * place for place in range(CRASH_COUNTERS)]
        if looks:
            suspicion = _KILLED if words[KILLED_FROM_OUTSIDE] else _DIED
            known = [place for place in places if words[place] == looks]
            (place,) = known or [min(places, key=lambda place: words[place + 1])]
            words[place + 1] = words[place + 1] + suspicion if known else suspicion
            words[place] = looks
            words[CURRENT_REQUEST] = 0
        return frozenset(words[place] for place in places if words[place + 1] >= _POISON)


# --- transitions, and what the next coordinator makes of them ---------------------------------------------------------


_STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED, "kept": BROKEN}


class Transactions:
    """Has transitions of the registry take effect: appended, then carried out, then marked as that."""

    def __init__(self, registry: Registry, effects: Effects, files: JournalFiles) -> None:
        self.registry = registry
        self.effects = effects
        self.journal = Journal(files, lambda: whole(registry, self.sessions))
        limits = registry.limits
        self.sessions = SessionTable(self.journal.most_replies(limits.remembered_requests), limits.max_sessions)
        self._failures = 0  # to append

    def commit(self, reply: Reply | None = None, *, is_refusal: bool = False) -> bool:
        """Have everything since the last call take effect, and keep the reply; returns whether that may be sent.

        What could not be appended is, with what follows, at the next call: who asked for it asks again. A refusal is
        kept in memory only: a reply that its client has not read is lost with the connection.
        """
        touched, tombstones = self.registry.touched, self.registry.tombstones
        self.effects.fill_in(touched.slots)
        replies = [] if reply is None or is_refusal else [reply]
        is_recorded = bool(touched or replies)
        if is_recorded:
            try:
                self.journal.append(record_of(self.registry, touched, replies, tombstones.new))
            except (OSError, MemoryError) as error:
                self._failures += 1
                if is_round(self._failures):
                    log.error("no memory for the journal", extra=fields(why=error, count=self._failures))
                return is_refusal
            self.effects.carry_out(touched)
            self.registry.touched = Touched()
            tombstones.new.clear()
        if reply is not None:  # before the log may be compacted: what is not kept is then in no log
            self.sessions.keep(reply.token, reply.id, reply.kept)
        if is_recorded:
            self.journal.carried_out()
        return True


def recover(transactions: Transactions, now_ns: int) -> list[Slot]:
    """Fill an empty registry and session table, and finish what was begun. Returns the slots that differ on the board.

    JournalError if the journal cannot be read, or is inconsistent.
    """
    journal, effects = transactions.journal, transactions.effects
    board, table = effects.board, transactions.sessions
    records, is_carried_out = journal.read()
    if not records:
        return []
    try:
        left = folded(records)
        _restore(transactions.registry, board, left)
        for slot in left.slots:
            effects.pool.handles(slot.ring)  # all are there
    except KeyError as error:
        raise JournalError(f"it names {error}, which does not exist") from None
    for session in left.sessions:
        session.beat_ns, session.told = now_ns, session.state
        table.add(session)
    for reply in left.replies:
        table.keep(reply.token, reply.id, reply.kept)
    if not is_carried_out:
        effects.redo(records[-1].sessions, records[-1].slots)
        journal.carried_out()
    for slot in left.slots:
        slot.told = slot.ended or "opened"
        if slot.is_released:
            effects.releaser.hold(slot.index, effects.line(slot.index))
    effects.pool.sweep(serial for slot in left.slots for serial in slot.ring)
    return [slot for slot in left.slots if board.slot(slot.index).state != _STATES[slot.state]]


def _restore(registry: Registry, board: Board, left: Record) -> None:
    lines = {session.line for session in left.sessions}
    # By the last session of each line: which line has been free for longest is unknown.
    free = sorted(set(range(board.sessions)) - lines, key=lambda line: board.session(line).serial)
    registry.restore(left.sessions, left.slots, free)
    registry.count, registry.high_water, registry.has_had_bridge = left.count, left.high_water, left.has_had_bridge
    for origin, tombstone in left.tombstones:
        registry.tombstones.add(origin, tombstone)
    registry.tombstones.new.clear()
