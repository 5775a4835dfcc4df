"""The processes of a chain: A records, B's stream waits for that and B records behind it, C waits for B's record.

C is a process of its own too. What the driver makes of A's unfinished work is `death`: it calls it complete, or it
leaves it pending for ever. The software driver does either; a GPU leaves it pending.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ipcsync
from tests.faults import chain_actions as do
from tests.faults.fixtures import state_of
from tests.kit.machine import Machine
from tests.kit.peer import Peer, at_end
from tests.kit.until import until

SOON_S = 1.0

NewPeer = Callable[..., Peer]

_machines: list[Machine] = []


def _close_machines() -> None:
    while _machines:
        _machines.pop().close()


at_end.append(_close_machines)


class Line:
    """The processes of one chain, each connected under its name, with an event `NAME/out` that it records on."""

    def __init__(self, endpoint: str, new_peer: NewPeer, engine: str, death: str = "complete") -> None:
        self.endpoint = endpoint
        self.engine = engine
        self.death = death
        self._new_peer = new_peer
        self.peers: dict[str, Peer] = {}
        self._machine = Machine()
        _machines.append(self._machine)
        self._since = time.monotonic()

    def add(self, name: str, *, records: bool = True, engine: str = "", depth: int = 4, **options: Any) -> Peer:
        """One more process."""
        peer = self._new_peer(IPCSYNC_HOST_DEATH=self.death)
        self.peers[name] = peer
        peer.call(do.connect, self.endpoint, name, options)
        if records:
            peer.call(do.open_event, f"{name}/out", engine or self.engine, depth)
        return peer

    def begin(self, **options: Any) -> bytes:
        """Add `a`, which records what never becomes complete; its point."""
        a = self.add("a", **options)
        a.call(do.hold)
        return a.call(do.record, "a/out")

    def follow(self, name: str, data: bytes, **options: Any) -> bytes:
        """Add a process that waits for a point on its stream, and records behind that; its own point."""
        peer = self.add(name, **options)
        peer.call(do.wait, data)
        return peer.call(do.record, f"{name}/out")

    def kill_a(self) -> int:
        """SIGKILL; its pid."""
        pid = self.peers["a"].pid
        self._since = time.monotonic()
        self.peers["a"].kill()
        return pid

    def until_seen(self, condition: Callable[[], object]) -> None:
        """Wait until A's death is seen, which takes no longer than a wait for its loss may."""
        began = time.monotonic()
        until(condition, "the death is seen")
        assert time.monotonic() - began < self._machine.limit(SOON_S, self._since)

    def assert_lost(self, loss: dict[str, Any] | None, pid: int, within_s: float = SOON_S) -> None:
        """It tells of A's death, at some remove."""
        assert loss is not None, "a silent pass"
        assert (loss["cause"], loss["session"], loss["pid"]) == ("behind", "a", pid), loss
        assert loss["took_s"] < self._machine.limit(within_s, self._since)


def of_events(coordinator: ipcsync.Coordinator, new_peer: NewPeer, death: str = "complete") -> Line:
    """A chain whose engine is `event`, and what the driver makes of the dead one's work."""
    return Line(coordinator.endpoint, new_peer, "event", death)


def waits(peer: Peer) -> bool:
    """Whether a process sleeps in a call."""
    return state_of(peer.pid) == "S" and not peer.has_result
