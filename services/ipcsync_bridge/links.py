"""Links between nodes as state machines: no socket, board or clock in here. `now` is CLOCK_MONOTONIC in seconds.

What travels are facts that only grow: "of this use, all up to g is complete". So news may be lost, repeated, late or in
another order, and merging them is a maximum within one identity. What is lost is found by numbers, and asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ipcsync_bridge.wire import Key, Row

WINDOW = 8  # news that are not acknowledged yet
ACK_EVERY = 4
PING_S = 1.0
RETRY_S = 0.1
_GRACE_S = 0.05  # by which an answer may be ahead of news that were sent before it
_RANKS = {"open": 0, "closed": 1, "broken": 2}


@dataclass
class Link:
    """What is known here of one use of another node's slot."""

    key: Key
    recorded: int = 0
    completed: int = 0
    lost: int = 0
    state: str = "open"
    cause: str = ""

    def merge(self, row: Row) -> bool:
        """Take in what is told; whether anything is new. A finished one hears nothing more."""
        if self.state == "broken" or row.state not in _RANKS:
            return False
        before = (self.recorded, self.completed, self.lost, self.state)
        self.recorded = max(self.recorded, row.recorded)
        # Never beyond what is told to be recorded: a GPU may have written its word before the record was published.
        self.completed = max(self.completed, min(row.completed, row.recorded))
        if row.lost and not 0 < self.lost <= row.lost:
            self.lost = row.lost
        if _RANKS[row.state] > _RANKS[self.state]:
            self.state, self.cause = row.state, row.cause
        return before != (self.recorded, self.completed, self.lost, self.state)

    @property
    def row(self) -> Row:
        """The same as it travels."""
        return Row(*self.key, self.recorded, self.completed, self.lost, self.state, self.cause)

    @property
    def is_over(self) -> bool:
        """Whether no news can change it any more."""
        return self.state == "broken" or (self.state == "closed" and self.completed >= self.recorded)


@dataclass
class Source:
    """A node, in one epoch of it, of whose events some are mirrored here.

    It counts as alive until the sending of the last ping that it answered, and `ttl_s` from there.
    """

    node: str
    epoch: bytes
    ttl_s: float
    alive_until: float
    links: dict[Key, Link] = field(default_factory=dict)
    term: int = 0
    channel: bytes = b""
    number: int = 0  # of the last news heard
    next_ping: float = 0.0
    next_keep: float = 0.0  # when it may be told again of what is not wanted any more
    last_heard: float = 0.0
    wants_sync: bool = False
    _missing: tuple[int, float] | None = None  # a number that an answer told of, and since when
    _acked: int = 0

    def touch(self, now: float) -> None:
        """A question that was sent at `now` was answered."""
        self.alive_until = max(self.alive_until, now + self.ttl_s)

    def is_of(self, term: int, epoch: bytes) -> bool:
        """Whether what carries these is of this life of the node; a lower term was overtaken."""
        if epoch != self.epoch or term < self.term:
            return False
        self.term = term
        return True

    def heard_news(self, channel: bytes, number: int, now: float) -> int:
        """News came. The number to acknowledge, 0 for none yet."""
        self.last_heard = now
        if channel != self.channel:
            self.wants_sync = True
            return 0
        if number > self.number + 1:
            self.wants_sync = True
        self.number = max(self.number, number)
        if self.number - self._acked < ACK_EVERY:
            return 0
        self._acked = self.number
        return self.number

    def heard_answer(self, channel: bytes, number: int, now: float) -> None:
        """An answer told the number of the last news, which may still be under way."""
        self.last_heard = now
        if channel != self.channel:
            self.wants_sync = True
        elif number > self.number and self._missing is None:
            self._missing = number, now

    def synced(self, channel: bytes, number: int) -> None:
        """The state of all links was asked for, and is merged; news up to `number` are in it."""
        if channel != self.channel:
            self.channel, self.number, self._acked = channel, 0, 0
        self.number = max(self.number, number)
        self._missing = None
        self.wants_sync = False

    def look(self, now: float) -> None:
        """Find out whether news that should have come were lost."""
        if self._missing is not None:
            number, since = self._missing
            if number <= self.number:
                self._missing = None
            elif now - since >= _GRACE_S:
                self.wants_sync = True

    @property
    def looks_at(self) -> float | None:
        """When `look` will know more."""
        return None if self._missing is None else self._missing[1] + _GRACE_S

    def pinged(self, now: float) -> None:
        """A ping was sent at `now`."""
        self.next_ping = now + PING_S

    def unreachable(self, now: float) -> None:
        """Nobody listens there now, as the server says: a bridge that is started again is to be found soon."""
        self.next_ping = min(self.next_ping, now + RETRY_S)

    def paused(self, now: float) -> None:
        """This process itself stood still until `now`: nobody's silence counts before."""
        self.alive_until = max(self.alive_until, now + self.ttl_s)
        self.next_ping = min(self.next_ping, now)

    def is_silent(self, now: float) -> bool:
        """Whether it is lost."""
        return now >= self.alive_until


@dataclass
class Follower:
    """A node that mirrors events of this one: what it is to be told next, which is never more than one row a use."""

    node: str
    last_asked: float
    keys: set[Key] = field(default_factory=set)
    number: int = 0
    conflated: int = 0
    next_tell: float = 0.0  # by the loop's clock: it is told nothing before
    _acked: int = 0
    _rows: dict[Key, Row] = field(default_factory=dict)

    def put(self, row: Row) -> None:
        """The newest state of a use; one that was not told yet is replaced."""
        if row.key in self.keys:
            self.conflated += row.key in self._rows
            self._rows[row.key] = row

    def take(self, most: int) -> list[Row]:
        """What is to be told now, with `number`; nothing while too much is unacknowledged."""
        if not self._rows or self.number - self._acked >= WINDOW:
            return []
        if len(self._rows) <= most:
            rows, self._rows = list(self._rows.values()), {}
        else:
            rows = [self._rows.pop(key) for key in list(self._rows)[:most]]
        self.number += 1
        return rows

    def give_back(self, rows: list[Row]) -> None:
        """They could not be sent: they are told later, unless there is something newer by then. The number is gone."""
        for row in rows:
            if row.key in self.keys:
                self._rows.setdefault(row.key, row)

    def acked(self, number: int) -> None:
        """News up to `number` were heard."""
        self._acked = max(self._acked, min(number, self.number))

    def reset(self) -> None:
        """It says by its pings that it has heard nothing of this channel: what it waits for, it asks for."""
        self._acked = self.number

    def drop(self, keys: set[Key]) -> None:
        """It wants to hear of these no more."""
        self.keys -= keys
        for key in keys:
            self._rows.pop(key, None)

    @property
    def pending(self) -> int:
        """How many uses it is to be told of."""
        return len(self._rows)
