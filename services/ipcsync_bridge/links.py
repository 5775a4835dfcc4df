"""Links between nodes as state machines: no socket, board or clock in here. `now` is CLOCK_MONOTONIC in seconds.

What travels are facts that only grow: "of this use, all up to g is complete". So news may be lost, repeated, late or in
another order, and merging them is a maximum within one identity. What is lost is found by numbers, and asked for.

They are structs, which a bridge leaves to the code that goes on in its place as they are.
"""

from __future__ import annotations

from msgspec import Struct

from ipcsync_bridge.wire import Key, Row

WINDOW = 8  # messages with news that are not acknowledged yet
ACK_EVERY = 4
RETRY_S = 0.1
_PING_S = 1.0
_PINGS = 4  # at least, in a TTL
_GRACE_S = 0.05  # an answer may arrive this much before news that were sent earlier
_ANSWER_S = 3.0  # from an answer until it is used, or was asked for again: three pings, and three tries of a question


class Source(Struct):
    """A node, in one epoch of it, of whose events some are mirrored here.

    It counts as alive until the sending of the last ping that it answered, and `ttl_s` from there.
    """

    node: str
    epoch: bytes
    ttl_s: float
    alive_until: float
    links: dict[Key, Row] = {}  # what is known of its uses
    term: int = 0
    channel: bytes = b""
    number: int = 0  # of the last news received
    next_ping: float = 0.0
    next_keep: float = 0.0  # when it may be sent again what is still wanted
    last_received: float = 0.0
    wants_sync: bool = False
    was_unequal: bool = False  # the last answer said another number of links than there are
    _missing: tuple[int, float] | None = None  # the number that an answer said, and since when it is missed
    _acked: int = 0

    @property
    def ping_s(self) -> float:
        """The time between two pings."""
        return min(_PING_S, self.ttl_s / _PINGS)

    def touch(self, now: float) -> None:
        """Note that a question sent at `now` was answered."""
        self.alive_until = max(self.alive_until, now + self.ttl_s)

    def is_of(self, term: int, epoch: bytes) -> bool:
        """Whether a message with these is from this life of the node; one with a lower term is not."""
        if epoch != self.epoch or term < self.term:
            return False
        self.term = term
        return True

    def received_news(self, channel: bytes, number: int, now: float) -> int:
        """Count a message with news; returns the number to acknowledge, 0 for none yet."""
        self.last_received = now
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

    def received_answer(self, channel: bytes, number: int, now: float) -> None:
        """Compare with the number of the last news, which an answer says; they may still be under way."""
        self.last_received = now
        if channel != self.channel:
            self.wants_sync = True
        elif number > self.number and self._missing is None:
            self._missing = number, now

    def syncing(self) -> None:
        """Note that the state of all links is asked for from now on: what is missed later is not in the answer."""
        self.wants_sync = False

    def synced(self, channel: bytes, number: int) -> None:
        """Note that the state of all links is merged; news up to `number` are in it."""
        if channel != self.channel:
            self.channel, self.number, self._acked, self._missing = channel, 0, 0, None
        self.number = max(self.number, number)

    def check(self, now: float) -> None:
        """Find out whether news were lost."""
        if self._missing is not None:
            number, since = self._missing
            if number <= self.number:
                self._missing = None
            elif now - since >= _GRACE_S:
                self.wants_sync = True
                self._missing = None  # the next answer says whether they still are

    @property
    def next_check(self) -> float | None:
        """When `check` has to be called next, None if it need not be."""
        return None if self._missing is None else self._missing[1] + _GRACE_S

    def pinged(self, now: float) -> None:
        """Note that a ping was sent at `now`."""
        self.next_ping = now + self.ping_s

    def unreachable(self, now: float) -> None:
        """Note that no node listens there, as the server says: ping again soon, to find a restarted bridge."""
        self.next_ping = min(self.next_ping, now + RETRY_S)

    def paused(self, now: float) -> None:
        """Note that this process stood still until `now`: silence before does not count."""
        self.alive_until = max(self.alive_until, now + self.ttl_s)
        self.next_ping = min(self.next_ping, now)

    def is_silent(self, now: float) -> bool:
        """Whether the node has been silent for the whole TTL."""
        return now >= self.alive_until


class Follower(Struct):
    """A node that mirrors events of this one, and what to send it next: at most one row for each use."""

    node: str
    last_asked: float
    keys: set[Key] = set()
    doubtful: set[Key] = set()
    """Of the keys, those that it did not want, as it said when it may not have known of them."""
    number: int = 0
    conflated: int = 0
    next_send: float = 0.0  # not before this time of the loop's clock
    _acked: int = 0
    _rows: dict[Key, Row] = {}
    _answered: dict[Key, float] = {}  # until when it may not know of a key

    def put(self, row: Row) -> None:
        """Send it this state of a use; it replaces an older one that was not sent yet."""
        if row.key in self.keys:
            self.conflated += row.key in self._rows
            self._rows[row.key] = row

    def take(self, most: int) -> list[Row]:
        """Take the rows to send now, as message `number`; none while too many messages are unacknowledged."""
        if not self._rows or self.number - self._acked >= WINDOW:
            return []
        if len(self._rows) <= most:
            rows, self._rows = list(self._rows.values()), {}
        else:
            rows = [self._rows.pop(key) for key in list(self._rows)[:most]]
        self.number += 1
        return rows

    def give_back(self, rows: list[Row]) -> None:
        """Send these rows later, unless newer ones come: they could not be sent. Their number is used up."""
        for row in rows:
            if row.key in self.keys:
                self._rows.setdefault(row.key, row)

    def acked(self, number: int) -> None:
        """Note that news up to `number` were received."""
        self._acked = max(self._acked, min(number, self.number))

    def reset(self) -> None:
        """Note that it knows nothing of this channel, as its ping says: it will ask for what it waits for."""
        self._acked = self.number

    def answered(self, key: Key, now: float) -> None:
        """Send it the news of a use from now on: it has asked, and the answer is under way."""
        self.keys.add(key)
        self.doubtful.discard(key)
        self._answered[key] = now + _ANSWER_S

    def keep(self, wanted: set[Key], now: float) -> set[Key]:
        """Take in which keys it wants. Returns those to drop: none that it may not have known of when it said so."""
        unwanted = self.keys - wanted
        self.doubtful = {key for key in unwanted if now < self._answered.get(key, 0.0)}
        return unwanted - self.doubtful

    def outdated(self, now: float) -> set[Key]:
        """The doubtful keys that it would have asked for again by now."""
        return {key for key in self.doubtful if now >= self._answered.get(key, 0.0)}

    def drop(self, keys: set[Key]) -> None:
        """Stop sending it these."""
        self.keys -= keys
        self.doubtful -= keys
        for key in keys:
            self._rows.pop(key, None)
            self._answered.pop(key, None)

    @property
    def pending(self) -> int:
        """How many rows are to be sent."""
        return len(self._rows)
