"""The rows of a registry, sessions and slots, which of them a transition touched, and all sessions by token.

They are the journal's rows too. They refer to each other by serial and index; what a start derives of them is in none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from ipcsync._wire.codec import Origin
from ipcsync.errors import QuotaExceeded
from ipcsync_keeper.config import Settings

if TYPE_CHECKING:
    from ipcsync._board import Peer

SlotState = Literal["free", "open", "broken", "closed", "kept"]
SessionState = Literal["live", "expired", "closed", "gone"]
SessionEnd = Literal["", "closed", "died", "expired"]
FinishedState = Literal["broken", "closed"]

UNKNOWN = -1
"""In place of a lock's inode: no lock shows the process's end."""

UNREAD = -1
"""In place of the last generation that counts: it stands on the board, and is read before anything is stored."""


MOST_TOMBSTONES = 65_536


class Recorder(Struct, eq=False, array_like=True):
    """A session as the slot that it records on knows it, also once it is gone; `end`: how it ended amid its use."""

    serial: int
    id: str
    name: str
    pid: int = 0  # 0: unknown
    end: SessionEnd = ""

    @property
    def label(self) -> str:
        return self.name or self.id

    @property
    def who(self) -> str:
        """Its name and process, for the text of an error."""
        return f"{self.label!r} (pid {self.pid})" if self.pid else repr(self.label)


class Use(Struct, frozen=True, array_like=True, gc=False):
    """The attachment of a reply, which is put together again for a retry: a deep ring's handles take 70 KB."""

    slot: int
    incarnation: int
    is_recorder: bool


Kept: TypeAlias = bytes | Use
"""A reply as it is kept: a short frame, or what an attachment's is made from."""


class Session(Recorder, eq=False, array_like=True, dict=True):
    """One client of a process. What this coordinator alone has of it is in no row.

    It is "gone" once it can touch nothing any more, and its line is free. `started` is its process's start time, 0 if
    it is unknown. Up to `forgotten` the replies to its requests are not kept.
    """

    state: SessionState = "live"
    started: int = 0
    streams: dict[str, tuple[str, int]] = {}  # that it named: device and priority
    role: str = ""  # "bridge"
    token: bytes = b""
    nonce: bytes = b""
    ttl_ns: int = 0
    opened_ns: int = 0
    why_not_event: str | None = None
    is_ready: bool = False
    forgotten: int = 0

    def __post_init__(self) -> None:
        self.attached: set[int] = set()
        """The slots that it may still touch."""
        self.peer: Peer | None = None  # says whether its process lives, once that is ready
        self.is_dead = False  # its process is, and not gone yet
        self.beat_ns = 0  # the latest heartbeat seen
        self.told: SessionState | Literal[""] = ""  # which of its states others were told
        self.replies: OrderedDict[int, Kept] = OrderedDict()  # by request, for a retry
        self.deadline_ns = 0  # of its last request; all requests of one call have the same

    @property
    def line(self) -> int:
        return self.serial & 0xFFFF


class Slot(Struct, eq=False, array_like=True, dict=True):
    """One place for a shared event. `ended`: how its use did, also once it is free.

    `active` sessions have it open; `draining` ones closed it but may still touch it.
    `is_drained` once it is closed and all its records are complete: its timeline word is not written any more, and
    waiters ahead are released. `ring` has the serials of its CUDA events.

    A mirror has the use of another node's slot that it stands for as `origin`, and the bridge as its recorder. Once it
    is broken, `reason` is that of `Finish`. One that was lost before a session opened it here has no recorder.

    Once any slot is broken or drained, `good` is the last generation that counts, and `reason`, of a broken one, is
    "expired" if its recorder did, "behind" if that lives and what it recorded stood behind a lost wait.
    `ended_ns` is when it was closed or broken, on CLOCK_MONOTONIC.
    `freed` grows with each slot that becomes free.

    `held` is not 0 once its recorder is gone while a GPU may still touch word or ring for it: the inode of the lock
    that shows the end of that, or `UNKNOWN`. Released by every session it is then "kept" instead of "free".
    """

    index: int
    state: SlotState = "free"
    ended: FinishedState | Literal[""] = ""
    incarnation: int = 0
    name: str = ""
    device: str = ""
    engine: str = ""
    depth: int = 0
    base: int = 0
    ring: list[int] = []
    recorder: Recorder | None = None
    active: set[int] = set()
    draining: set[int] = set()
    is_drained: bool = False
    origin: Origin | None = None
    node: str = ""
    reason: str = ""
    good: int = 0
    freed: int = 0
    held: int = 0
    ended_ns: int = 0

    def __post_init__(self) -> None:
        self.told: FinishedState | Literal["", "opened"] = ""
        """What others were told last of its use, by this coordinator."""

    @property
    def is_over(self) -> bool:
        """Whether no session uses it."""
        return self.state in ("free", "kept")

    def is_recorded_by(self, session: Session) -> bool:
        return self.recorder is not None and self.recorder.serial == session.serial

    @property
    def is_unwanted(self) -> bool:
        """Whether it is a mirror that only the bridge uses."""
        recorder = self.recorder
        return self.origin is not None and recorder is not None and self.active | self.draining == {recorder.serial}

    @property
    def is_released(self) -> bool:
        """Whether its timeline's word is to let every waiter pass."""
        is_done = self.state in ("broken", "kept") or (self.state == "closed" and self.is_drained)
        return self.engine == "timeline" and is_done

    @property
    def cause(self) -> str:
        """Why its use ended, as `Announcement` and `EventInfo` have it; empty for an open one."""
        recorder = self.recorder
        if self.origin is not None or self.reason:
            return self.reason
        if recorder is None or not self.ended:
            return ""
        end = "died" if self.ended == "broken" and recorder.end == "closed" else recorder.end  # amid its drain
        return end or ("closed" if self.ended == "closed" else "behind")

    def quarantined_s(self, now_ns: int) -> float | None:
        """For how many seconds it has waited for every session to release it or be proven dead; None if it does not."""
        return (now_ns - self.ended_ns) / 1e9 if self.state in ("broken", "closed") else None


# --- what a transition touched ----------------------------------------------------------------------------------------


@dataclass
class Touched:
    """What a transition touched, and what is in no record of the journal yet.

    `attachments`: (slot, serial) of sessions that attached to a slot or left it, which alone does not touch the slot.
    `unwanted`: mirrors that only the bridge uses any more, of which it is told.
    """

    slots: set[Slot] = field(default_factory=set)
    sessions: set[Session] = field(default_factory=set)
    attachments: set[tuple[Slot, int]] = field(default_factory=set)
    unwanted: set[Slot] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.slots or self.sessions or self.attachments or self.unwanted)


# --- what stays of other nodes' uses ----------------------------------------------------------------------------------


class Tombstone(NamedTuple):
    """The rest of a lost use: generations up to `good` stay good. `reason` is that of `Finish`."""

    node: str
    good: int
    reason: str


class Tombstones:
    """The uses of other nodes' slots that are lost for good on this node, also once their mirrors are released.

    They are kept for the coordinator's life. Beyond `MOST_TOMBSTONES` all uses of that epoch are lost.
    """

    def __init__(self) -> None:
        self._tombstones: dict[Origin, Tombstone] = {}  # one of a whole epoch has slot and incarnation 0
        self.new: list[tuple[Origin, Tombstone]] = []  # in no record of the journal yet

    def add(self, origin: Origin, tombstone: Tombstone) -> None:
        """Add a lost use. The first call for a use counts."""
        if self.find(origin) is not None:
            return
        self.new.append((origin, tombstone))
        if not origin.incarnation or len(self._tombstones) >= MOST_TOMBSTONES:
            for known in [each for each in self._tombstones if each.epoch == origin.epoch]:
                del self._tombstones[known]
            origin, tombstone = Origin(origin.epoch, 0, 0), tombstone._replace(good=0)
        self._tombstones[origin] = tombstone

    def find(self, origin: Origin) -> Tombstone | None:
        """The tombstone of a use, None if the use is not lost."""
        return self._tombstones.get(origin) or self._tombstones.get(Origin(origin.epoch, 0, 0))

    def everything(self) -> list[tuple[Origin, Tombstone]]:
        return list(self._tombstones.items())


# --- all sessions, and all slots that are kept ------------------------------------------------------------------------


class SessionTable:
    """All sessions, by token; iterating goes over those there are at the beginning.

    Of each, `replies` last replies are kept, and the last one of each of the `sessions` sessions that ended last.
    """

    def __init__(self, replies: int, sessions: int) -> None:
        self._most_replies = replies
        self._most_final_replies = sessions
        self._by_token: dict[bytes, Session] = {}
        self._by_nonce: dict[bytes, Session] = {}
        self._final_replies: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()  # of sessions gone, for their retry
        self.find = self._by_token.get
        self.of_nonce = self._by_nonce.get

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_token.values()))

    @property
    def has_living(self) -> bool:
        """Whether there is a session of a process that is not known to be dead."""
        return any(not session.is_dead for session in self._by_token.values())

    def bridge(self) -> Session | None:
        """The live session that links this coordinator's events with those of other nodes."""
        return next((each for each in self._by_token.values() if (each.role, each.state) == ("bridge", "live")), None)

    def add(self, session: Session) -> None:
        self._by_token[session.token] = self._by_nonce[session.nonce] = session

    def forget(self, session: Session) -> None:
        del self._by_token[session.token], self._by_nonce[session.nonce]

    def keep(self, token: bytes, request_id: int, reply: Kept) -> None:
        """Keep a reply for the case that its request comes again."""
        session = self._by_token.get(token)
        if session is not None:
            session.replies[request_id] = reply
            if len(session.replies) > self._most_replies:
                oldest, _ = session.replies.popitem(last=False)
                session.forgotten = max(session.forgotten, oldest)
        elif not isinstance(reply, Use):  # its own last request ended it, which no attachment is the reply to
            self._final_replies[token] = (request_id, reply)
            if len(self._final_replies) > self._most_final_replies:
                self._final_replies.popitem(last=False)

    def replies(self) -> Iterator[tuple[bytes, int, Kept]]:
        """All replies that are kept: token, request id, reply; each session's in the order in which they were kept."""
        for token, session in self._by_token.items():
            for request_id, reply in session.replies.items():
                yield token, request_id, reply
        for token, (request_id, reply) in self._final_replies.items():
            yield token, request_id, reply

    def final_reply(self, token: bytes, request_id: int) -> bytes | None:
        last_id, reply = self._final_replies.get(token, (0, b""))
        return reply if last_id == request_id else None


class KeptSlots:
    """Slots by recorders that are gone, and for which a GPU may still touch them.

    One that every session has released is "kept", and counts within limits of its own, not for the pool: what ends its
    use is in nobody's hands here.
    """

    def __init__(self, limits: Settings) -> None:
        self._limits = limits
        self.by_recorder: dict[int, list[Slot]] = {}
        self._slots: Counter[str] = Counter()  # by engine; counted, since each open asks
        self._cuda_events = 0

    def hold(self, slot: Slot) -> None:
        """Note that its recorder is gone, and its work may not be over."""
        assert slot.recorder is not None
        self.by_recorder.setdefault(slot.recorder.serial, []).append(slot)

    def count(self, slot: Slot, by: int) -> None:
        """Count one that is kept from now on (1), or not any more (-1)."""
        self._slots[slot.engine] += by
        self._cuda_events += by * len(slot.ring)

    @property
    def within_limits(self) -> int:
        """How many are kept, without those beyond an engine's limit."""
        return sum(min(count, self._limits.kept_slots) for count in self._slots.values())

    def counts(self, left_pending: int) -> dict[str, int]:
        """How many words and CUDA events are kept, as in `Client.stats()`; `left_pending` as in `Pool`."""
        return {"timeline": self._slots["timeline"], "event": self._cuda_events + left_pending}

    @property
    def limits(self) -> dict[str, int]:
        """From how many of them on new events are refused."""
        return {"timeline": self._limits.kept_slots, "event": self._limits.max_cuda_events // 2}

    def check(self, engine: str, left_pending: int) -> None:
        """Raise QuotaExceeded if too much of an engine is kept for a new event; `left_pending` as in `Pool`."""
        bounds = [(self._slots[engine], self._limits.kept_slots, "slots", "half of --pool")]
        if engine == "event":
            count = self.counts(left_pending)[engine]
            bounds.append((count, self.limits["event"], "CUDA events", "half of --max-cuda-events"))
        for count, limit, what, setting in bounds:
            if count >= limit:
                raise QuotaExceeded(
                    f"new events of the engine {engine!r} are refused: {count} {what} of dead recorders are kept "
                    f"({setting}), since their GPU work may go on: {self._why()}",
                    limit=limit,
                )

    def _why(self) -> str:
        of_all = (slot for slots in self.by_recorder.values() for slot in slots)
        pids = {slot.recorder.pid for slot in of_all if slot.recorder and slot.held > 0}
        if pids:
            named = ", ".join(map(str, sorted(pids)[:8]))
            return f"a process forked from pid {named} still has the driver's files open: end it (the log names it)"
        return "whether it does is never known (CUDA MPS, no lock, a record left pending): start the coordinator anew"
