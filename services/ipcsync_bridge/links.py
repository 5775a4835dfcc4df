"""Links between nodes as state machines: no socket, board or clock in here. `now` is CLOCK_MONOTONIC in seconds.

What travels are facts that only grow: "of this use, all up to g is complete". So news may be repeated, late or in
another order, and merging them is a maximum within one identity. What is lost is sent again.

Which uses a node wants has a number, which each change of it changes. The other node answers each ping with the number
of what it sends news of; while that is not the present one, or 0 after a restart, it is sent all of it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from ipcsync_bridge.wire import Key, Row

UNSURE = 1
"""The version of a node that sends news of something which its peer may not want, or not know that it does."""
_PING_S = 1.0
_PINGS = 4  # at least, in a TTL
_ANSWER_S = 3.0  # from an answer until it is used, or was asked for again: three pings, and three tries of a question


@dataclass(eq=False)
class Source:
    """A node, in one epoch of it, of whose events some are mirrored here.

    It counts as alive until the sending of the last ping that it answered, and `ttl_s` from there.
    """

    node: str
    epoch: bytes
    ttl_s: float
    alive_until: float
    links: dict[Key, Row] = field(default_factory=dict)  # what is known of its uses
    term: int = 0
    last_received: float = 0.0
    version: int = field(default_factory=lambda: 2 + secrets.randbits(61))  # of which uses are wanted
    known_version: int = UNSURE  # which it sends news of, as it last said
    has_missed: bool = False  # news that it has sent may not have come to this code, until it sends all again

    @property
    def ping_s(self) -> float:
        """The time between two pings."""
        return min(_PING_S, self.ttl_s / _PINGS)

    def link(self, row: Row) -> None:
        """Want the news of a use, of which `row` is known."""
        self.links[row.key] = self.links.get(row.key, row).merged(row)
        self.version += 1

    def unlink(self, key: Key) -> None:
        """Want no news of a use any more."""
        self.links.pop(key, None)
        self.version += 1

    def touch(self, now: float) -> None:
        """Note that a question sent at `now` was answered."""
        self.alive_until = max(self.alive_until, now + self.ttl_s)

    def is_of(self, term: int, epoch: bytes) -> bool:
        """Whether a message with these is from this life of the node; one with a lower term is not."""
        if epoch != self.epoch or term < self.term:
            return False
        self.term = term
        return True

    def answered(self, version: int, sent: float, now: float) -> None:
        """Note an answer to what was `sent` then, and which version of what is wanted it names."""
        self.touch(sent)
        self.last_received = now
        self.known_version = version
        self.has_missed &= version != self.version


@dataclass(eq=False)
class Follower:
    """A node that mirrors events of this one, and what to send it next: at most one row for each use.

    `keys` are the uses that it wants, each with the time until which it may not know that it does.
    """

    node: str
    last_asked: float
    keys: dict[Key, float] = field(default_factory=dict)
    version: int = UNSURE  # of what it wants, as it last said
    is_sent_to: bool = False
    rows: dict[Key, Row] = field(default_factory=dict)  # what it does not have yet, as it has said, the oldest first
    _sent: dict[Key, Row] = field(default_factory=dict)  # of them, those of the last message

    def put(self, row: Row) -> bool:
        """Send it this state of a use, if it wants it. Whether that replaces an older one that was not sent yet."""
        old = self.rows.pop(row.key, None)
        if row.key in self.keys:
            self.rows[row.key] = row
        return old is not None and self._sent.get(row.key) is not old

    def take(self, most: int) -> list[Row]:
        """The rows to send now, and again unless `acked` is called."""
        self._sent = dict(islice(self.rows.items(), most))
        return list(self._sent.values())

    def acked(self) -> None:
        """Note that it has what was sent."""
        for key, row in self._sent.items():
            if self.rows.get(key) is row:
                del self.rows[key]

    def answered(self, key: Key, now: float) -> None:
        """Send it the news of a use from now on: it has asked, and the answer is under way."""
        if key not in self.keys:
            self.version = UNSURE
        self.keys[key] = now + _ANSWER_S

    def unwanted(self, wanted: set[Key], now: float) -> tuple[set[Key], bool]:
        """Of its keys, those that it does not want, and whether these are all: not if it may not know of some yet."""
        unwanted = self.keys.keys() - wanted
        known = {key for key in unwanted if now >= self.keys[key]}
        return known, known == unwanted

    def drop(self, keys: Iterable[Key]) -> None:
        """Stop sending it these."""
        for key in keys:
            self.keys.pop(key, None)
            self.rows.pop(key, None)
