"""Links between nodes as state machines: no socket, board or clock in here. `now` is CLOCK_MONOTONIC in seconds.

What travels are facts that only grow: "of this use, all up to g is complete". So news may be repeated, late or in
another order, and merging them is a maximum within one identity. What is lost is sent again.

They are structs, which a bridge leaves to the code that goes on in its place as they are.
"""

from __future__ import annotations

from msgspec import Struct

from ipcsync_bridge.wire import Key, Row

RETRY_S = 0.1
_PING_S = 1.0
_PINGS = 4  # at least, in a TTL
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
    life: bytes = b""  # of the bridge that was asked for all links
    next_ping: float = 0.0
    last_received: float = 0.0
    wants_sync: bool = False
    was_unequal: bool = False  # the last answer said another number of links than there are

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

    def answered(self, life: bytes, sent: float, now: float) -> None:
        """Note an answer to a question `sent` then. Another bridge than that before does not know of the links."""
        self.touch(sent)
        self.last_received = now
        self.wants_sync |= life != self.life

    def pinged(self, now: float) -> None:
        """Note that a ping was sent at `now`."""
        self.next_ping = now + self.ping_s

    def unreachable(self, now: float) -> None:
        """Note that no node listens there, as the server says: ping again soon, to find a restarted bridge."""
        self.next_ping = min(self.next_ping, now + RETRY_S)

    def paused(self, now: float) -> None:
        """Note that this process stood still until `now`: silence before does not count."""
        self.touch(now)
        self.next_ping = min(self.next_ping, now)
        self.wants_sync = True

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
    is_sent_to: bool = False
    _rows: dict[Key, Row] = {}  # to be sent
    _sent: dict[Key, Row] = {}  # sent, and not acknowledged
    _answered: dict[Key, float] = {}  # until when it may not know of a key

    def put(self, row: Row) -> bool:
        """Send it this state of a use, if it wants it. Whether that replaces an older one that was not sent yet."""
        is_conflated = row.key in self._rows
        if row.key in self.keys:
            self._rows[row.key] = row
        return is_conflated

    def take(self, most: int) -> list[Row]:
        """Take the rows to send now, until `acked` or `unanswered`."""
        self._sent = {key: self._rows.pop(key) for key in list(self._rows)[:most]}
        return list(self._sent.values())

    def acked(self) -> None:
        """Note that it has what was sent."""
        self._sent = {}

    def unanswered(self) -> None:
        """Send again what was sent, unless newer rows have come: it may have been lost."""
        self._rows, self._sent = {**self._sent, **self._rows}, {}

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
            self._sent.pop(key, None)
            self._answered.pop(key, None)

    @property
    def pending(self) -> int:
        """How many rows it does not have yet, as far as it has said."""
        return len(self._rows.keys() | self._sent.keys())
