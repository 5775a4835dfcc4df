"""The model of a coordinator that is killed at any of its steps and started again: what there is, what may be wrong.

One slot, two sessions: R opens it as the recorder, records one generation, closes and says goodbye; W opens it by name,
queries or waits, closes, and opens the name anew as its recorder, which takes the slot's next use. Beside them: the
GPU, the keeper with its CUDA events (rings of one), the board, the journal, and one coordinator at a time, with these
steps for each request, death or expiry:

    transition in memory, where all that its rows need is read  →  A append  →  E its rows on the board and at the
    keeper, one store a step  →  D "carried out" is stored in the journal  →  R reply

Faults, each with a budget: the coordinator is killed at any step (what lies in its queues is gone, and so is a reply
that a client has not read: a DEALER with IMMEDIATE=1 drops it with the connection); R is killed at any step, with its
work never complete afterwards, of which the driver may say anything; R is stopped for longer than its TTL, and goes on;
a client sends twice; W gives a request up. A new coordinator reads the journal, carries out the last record again
unless it was marked as carried out, destroys the keeper's events that are in no ring, and then serves.

Safety is judged in every state (`judge`, and `wrong` in each step); and from every state the end must be in reach in
which nobody waits, nothing is leased, the slot is free, and the keeper has no event but spare ones (leaks and hangs).

Left out: wakes (a waiter looks every 50 ms), the feed (a new start's numbers are above all old ones, and a subscriber
asks for a snapshot), more than one request in flight a client, pids, descriptors.

`restart_coordinator` has the coordinator's steps, `restart_clients` the clients', `restart_model` walks them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Values = tuple[Any, ...]
"""An effect, a request or a reply: its kind, and what it holds."""

FREE, OPEN, BROKEN, CLOSED = "FREE", "OPEN", "BROKEN", "CLOSED"
R, W = 1, 2
MAX = 99  # INT64_MAX

MISTAKES = {
    # those that the design names
    "reply before append": "the reply goes out, then the record is appended",
    "effect before append": "the board is written, then the record is appended",
    "watermark at the effect": "the watermark is read when it is stored, again at a redo, not kept in the record",
    "ring decided at the effect": "whether a freed ring is given back is read from the board, again at a redo",
    "expiry not appended": "deaths and expiries, which no request brings, are carried out without a record",
    "old one still writing": "the new one begins before the kernel has told that the old one is dead",
    # those that the design, as it was, did not exclude
    "no carried-out mark": "a start redoes the last record although its reply was sent and acted upon",
    "base at a redo": "a start redoes the last record, replied to or not, and reads a new use's base from the board",
    "redo skipped": "a start does not carry out the last record again",
    "held not rebuilt": "a start does not know which timeline words were released, and does not keep them so",
    "given up for good": "a client that gave a request up never asks what became of it at the coordinator that died",
    "late before kept": "a request past its deadline is dropped before it is looked up among the kept replies",
    "reply not appended": "the kept reply is in memory only",
    "no sweep": "a start leaves the keeper's events that are in no ring",
    "sweep takes quarantined rings": "a start destroys the rings of all slots that are not open",
    "swap by message": "the keeper learns of a compacted journal by a message, which it reads after the death",
    "journal from the board": "a start believes the board's states where the journal differs",
}
# "refusals not appended" looks wrong and is not, as long as a reply that was not read goes with its connection.


class Slot(NamedTuple):
    """The registry's slot; sets of sessions are bits."""

    inc: int = 0
    state: str = FREE
    base: int = 0
    ring: int = 0
    rec: int = 0
    active: int = 0
    draining: int = 0
    drained: bool = False


class Reg(NamedTuple):
    """What the journal holds: slot, sessions ("live", "expired", "gone"), the last reply of each."""

    slot: Slot = Slot()
    sess: tuple[str, ...] = ("live", "live")
    kept: tuple[tuple[int, Values | None], ...] = ((0, None), (0, None))


class Work(NamedTuple):
    """What the coordinator is at: stages left, effects left, all effects, (session, id, reply)."""

    stages: str
    rest: tuple[Values, ...]
    todo: tuple[Values, ...]
    target: Values


class Client(NamedTuple):
    alive: bool = True
    at: str = "open"
    id: int = 1
    waits: bool = False  # for the reply to `id`
    copies: tuple[tuple[int, Values], ...] = ()  # of its requests in the coordinator's queue: (id, operation)
    sent_in: int = 0  # which start it was sent to
    buf: tuple[tuple[int, Values], ...] = ()
    late: int = 0  # given up
    inc: int = 0  # of the use that it holds, 0: none
    base: int = 0
    ring: int = 0
    queued: int = 0  # its stream waits for this value of the word
    made: bool = False  # recorded
    held: int = 0  # a word loaded in the step before
    owner: bool = False  # its session's line has its mark of life
    silent: bool = False
    tries: int = 0


class World(NamedTuple):
    # the board
    inc: int = 0
    state: str = FREE
    rec: int = 0
    wm: int = 0
    recorded: int = 0
    completed: int = 0
    lines: tuple[str, ...] = ("LIVE", "LIVE")
    # GPU and keeper
    truth: frozenset[int] = frozenset()
    pending: tuple[int, ...] = ()  # R's record: its count, and the slot's use
    rings: tuple[int | None, ...] = ()  # by number - 1: the count that its event holds, None once destroyed
    # the coordinator
    mem: Any = Reg()  # a Reg, None while there is no coordinator
    spare: int = 0
    held: bool = False
    work: Any = None  # a Work, while it is at something
    starts: int = 0
    journal: Reg = Reg()
    todo: tuple[Values, ...] = ()
    done: bool = True
    did: tuple[int, ...] = (0, 0)  # ghost: the highest request of each that was decided for good
    zombie: tuple[Values, ...] = ()  # mistake: what an old one still writes
    stale: tuple[Reg, tuple[Values, ...], bool] | None = (
        None  # mistake: the journal that the keeper takes for the present one
    )
    r: Client = Client()
    w: Client = Client()
    kills: int = 0
    deaths: int = 0
    stops: int = 0
    doubles: int = 0
    giveups: int = 0
    swaps: int = 0
    wrong: str = ""

    def of(self, s: int) -> Client:
        return self.r if s == R else self.w

    def put(self, s: int, **values: Any) -> World:
        return self._replace(r=self.r._replace(**values)) if s == R else self._replace(w=self.w._replace(**values))


@dataclass(frozen=True)
class Scenario:
    engine: str = "event"
    kills: int = 1
    deaths: int = 0
    stops: int = 0
    doubles: int = 0
    giveups: int = 0
    greets: bool = False
    wanted: int = 1  # the generation that W waits for; R records one
    unread_stay: bool = False  # a reply that was not read outlives the connection, as it does without IMMEDIATE=1
    mistakes: frozenset[str] = frozenset()
